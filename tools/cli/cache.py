"""`kvloom cache`: the result caches of a running fabric's routers."""

from __future__ import annotations

import asyncio
from typing import Final

import click
import grpc
import redis.exceptions

from kvloom.v1.router_service_pb2 import ClearResultCacheRequest
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.config import ConfigError, KvloomConfig, load_config
from kvloom_common.discovery.registry import RouterRegistry
from tools.cli.running import running_folder
from tools.fabric_trust import trust_of
from tools.failures import CommandError
from tools.options import FabricFlags, fabric_options, option

TIMEOUT_SECONDS: Final = 10.0


@click.group()
def cache() -> None:
    """The result caches of the routers (docs/how-to/result-cache.md)."""


@cache.command()
@option("--tenant", scope="cache", metavar="ORGANISATION/PROJECT", help="Only the answers that this tenant can get.")
@fabric_options
def clear(tenant: str | None, fabric: FabricFlags) -> None:
    """Forget the answers that the routers of the fleet keep, and those that are being generated now.

    A change of a model, an adapter or the safety policy needs no clearing. Exits with 1 if a router could not be
    reached.
    """
    folder = running_folder(fabric)
    try:
        config = load_config(folder.config_path)
    except ConfigError as error:
        raise CommandError(str(error)) from error
    cleared, failed = asyncio.run(_clear(config, tenant))
    print(f"forgot {sum(cleared.values())} answers in {len(cleared)} routers")
    if failed:
        raise CommandError(f"these routers could not be reached: {', '.join(sorted(failed))}")


async def _clear(config: KvloomConfig, tenant: str | None) -> tuple[dict[str, int], list[str]]:
    """(answers by router, routers that could not be reached). Raises CommandError."""
    trust = trust_of(config)
    registry = RouterRegistry(config.redis.url, config.redis.key_prefix, trust.sealer)
    try:
        routers = await registry.list_routers()
    except (redis.exceptions.RedisError, OSError) as error:
        raise CommandError(f"the registry cannot be read: {error}") from error
    finally:
        await registry.close()
    request = ClearResultCacheRequest()
    if tenant is not None:
        request.tenant = tenant
    cleared: dict[str, int] = {}
    failed: list[str] = []
    for address, record in routers.items():
        async with trust.open_channel(address, "router") as channel:
            try:
                response = await RouterServiceStub(channel).ClearResultCache(request, timeout=TIMEOUT_SECONDS)
                cleared[record.router_id] = response.num_answers
            except grpc.aio.AioRpcError:
                failed.append(record.router_id)
    return cleared, failed
