"""A router and a real shard, with a simulated engine, of a fabric that has a secret."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CollectorRegistry

from kvloom_common.discovery.records import ShardRecord
from kvloom_common.discovery.registry import ShardRegistry
from kvloom_common.trust.secret import FabricSecret
from kvloom_common.trust.shared_secret import SharedSecret
from router.core.core import RouterCore
from router.core.tenancy.limiter import Limiter
from router.core_settings import core_config
from router.server import RouterServer
from tests.fakes.router_world import TIMEOUT_SECONDS, RouterWorld
from tests.fakes.served_models import catalogue_of
from tests.fakes.shard_world import shard_world

MODEL = "model"
SECRET = FabricSecret.draw()


@contextlib.asynccontextmanager
async def served_router(
    world: RouterWorld, limiter: Limiter | None = None, **shard_fields: Any
) -> AsyncIterator[tuple[RouterServer, str]]:
    """A router and a real shard of a fabric with a secret."""
    trust = SharedSecret(SECRET, ("router",), "router-0")
    world.config.model.name = MODEL
    shard_trust = SharedSecret(SECRET, ("shard",), "shard-0")
    async with shard_world(shard_id="shard-0", trust=shard_trust, **shard_fields) as shard:
        registry = ShardRegistry(world.config.redis.url, world.config.redis.key_prefix, trust.sealer)
        await registry.announce(ShardRecord("shard-0", shard.address, MODEL, shard.server.incarnation_id))
        core = RouterCore(core_config(world.config), limiter=limiter)
        server = RouterServer(
            world.config,
            core,
            catalogue_of(world.config, world.tokenizer),
            "router-0",
            CollectorRegistry(),
            trust=trust,
        )
        address = await server.start("127.0.0.1", 0)
        stop = asyncio.Event()
        serving = asyncio.create_task(server.serve(stop))
        try:
            yield server, address
        finally:
            stop.set()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await serving
            await registry.close()
