"""`kvloom drain` and `kvloom undrain`: take a shard out of service without losing its requests, and put it back."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Final

import click
import grpc

from kvloom.v1 import shard_service_pb2, shard_service_pb2_grpc
from tools.failures import CommandError
from tools.fleet.members import Fleet
from tools.options import config_option, data_dir_option, option
from tools.supervisor.readiness import reachable_address

POLL_SECONDS: Final = 0.1
CALL_TIMEOUT_SECONDS: Final = 5.0
_LOST: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}


@click.command()
@click.argument("shard")
@option(
    "--deadline-seconds",
    scope="drain",
    type=click.FloatRange(min=0),
    metavar="S",
    help="The time after which running requests are moved to other shards.  [default: wait until they end]",
)
@data_dir_option
@config_option
def drain(shard: str, deadline_seconds: float | None, data_dir: Path | None, config_file: Path | None) -> None:
    """Send no new requests to SHARD (a name in `kvloom status`), and return when it has no requests left.

    SHARD may be on any machine of the fleet. Requests for which no other shard has room stay on SHARD. It drains until
    `kvloom undrain` or a restart of its process, even if this command is interrupted.
    """
    asyncio.run(_drain(shard, Fleet.open(data_dir, config_file), deadline_seconds))
    print(f"{shard} is drained")


@click.command()
@click.argument("shard")
@data_dir_option
@config_option
def undrain(shard: str, data_dir: Path | None, config_file: Path | None) -> None:
    """Send requests to SHARD (a name in `kvloom status`) again."""
    asyncio.run(_undrain(shard, Fleet.open(data_dir, config_file)))
    print(f"{shard} takes requests again")


async def find_shard(fleet: Fleet, name: str) -> str:
    """Returns the address of a shard. Raises CommandError, which names the existing shards, if there is none."""
    local, _ = await fleet.local_state()
    shards = {p.name: p for p in local.processes if p.role == "shard"} if local is not None else {}
    if name in shards:
        if not shards[name].address:
            raise CommandError(f"{name} does not serve now ({shards[name].state})")
        return reachable_address(shards[name].address)
    if local is None and not fleet.config.redis.url:
        fleet.folder.require_running()
    records = (await fleet.records()).shards
    if name not in records:
        raise CommandError(f"there is no shard {name!r}; there are: {', '.join(sorted({*shards, *records}))}")
    return records[name].address


async def _drain(shard: str, fleet: Fleet, deadline_seconds: float | None) -> None:
    """Prints the counts to stderr whenever they change."""
    address = await find_shard(fleet, shard)
    try:
        async with fleet.trust.open_channel(address, "shard", shard) as channel:
            stub = shard_service_pb2_grpc.ShardServiceStub(channel)
            request = shard_service_pb2.DrainRequest(draining=True, deadline_seconds=deadline_seconds)
            answer = await stub.Drain(request, timeout=CALL_TIMEOUT_SECONDS)
            if answer.HasField("error"):
                raise CommandError(answer.error.message)
            printed = None
            counts = (answer.num_running, answer.num_waiting)
            while any(counts):
                if counts != printed:
                    print(f"{shard}: {counts[0]} running, {counts[1]} waiting", file=sys.stderr)
                    printed = counts
                await asyncio.sleep(POLL_SECONDS)
                info = await stub.GetInfo(shard_service_pb2.GetInfoRequest(), timeout=CALL_TIMEOUT_SECONDS)
                if not info.load.draining:
                    raise CommandError(f"{shard} takes requests again: it was undrained or restarted")
                counts = (info.load.num_running, info.load.num_waiting)
    except grpc.aio.AioRpcError as error:
        raise _unreachable(shard, address, error) from error


async def _undrain(shard: str, fleet: Fleet) -> None:
    address = await find_shard(fleet, shard)
    try:
        async with fleet.trust.open_channel(address, "shard", shard) as channel:
            stub = shard_service_pb2_grpc.ShardServiceStub(channel)
            request = shard_service_pb2.DrainRequest(draining=False)
            answer = await stub.Drain(request, timeout=CALL_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise _unreachable(shard, address, error) from error
    if answer.HasField("error"):
        raise CommandError(answer.error.message)


def _unreachable(shard: str, address: str, error: grpc.aio.AioRpcError) -> CommandError:
    if error.code() in _LOST:
        return CommandError(f"{shard} does not answer at {address}")
    return CommandError(f"{shard}: {error.details()}")
