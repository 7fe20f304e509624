"""A real router, and real shard servers of several models behind it, in one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from prometheus_client import CollectorRegistry

from kvloom_common.config import KvloomConfig, ModelConfig, ShadowConfig, ShardConfig, SimConfig
from kvloom_common.discovery.records import ShardRecord
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.models.likelihood_gap import GapSums, gap_sums_of
from kvloom_common.models.served_model import ServedModel
from kvloom_common.text.tokenizer import ModelTokenizer
from router.core.core import RouterCore
from router.core_settings import core_config
from router.features.shadow.pair import ShadowSettings
from router.server import RouterServer
from shard_server.engines.base import Engine
from shard_server.engines.sim_engine import SimEngine
from shard_server.server import ShardServer
from tests.fakes.router_world import TIMEOUT_SECONDS, RouterWorld
from tests.fakes.shard_world import VOCABULARY, WordTokenizer

MODEL, CANDIDATE = "served", "candidate"
PAIR = {"model": MODEL, "candidate": CANDIDATE}


class ShadowWorld(RouterWorld):
    """`MODEL` and `CANDIDATE` have the same tokenizer unless `other_tokenizer` is given."""

    def __init__(
        self, redis_url: str, tokenizer: ModelTokenizer, other_tokenizer: ModelTokenizer | None = None
    ) -> None:
        super().__init__(redis_url)
        self.config.model.name = MODEL
        self.tokenizer = tokenizer
        self.shard_tokenizer: ModelTokenizer | WordTokenizer = WordTokenizer()
        """With which shards started later make text of tokens."""
        other = other_tokenizer or tokenizer
        self._catalogue = Catalogue([ServedModel(MODEL, tokenizer), ServedModel(CANDIDATE, other)])

    async def bind_router(self) -> None:
        core = RouterCore(core_config(self.config))
        self.server = RouterServer(self.config, core, self._catalogue, "router-0", self.metrics)
        self.address = await self.server.start("127.0.0.1", 0)

    def shadow(self, **settings: object) -> ShadowConfig:
        """Has the router sample all answers, or as the settings say."""
        shadow = ShadowSettings(**{"model": MODEL, "candidate": CANDIDATE, "share": 1.0, **settings})
        self.server.features.shadows.set_shadows([shadow])
        return shadow

    async def add_model(self, name: str, engine: Engine | None = None, **shard: object) -> CollectorRegistry:
        """Starts a shard of the model: by default a simulated one. Returns its metrics."""
        config = ShardConfig(engine="sim", sim=SimConfig(step_ms=1.0, prefill_tokens_per_second=1e7), **shard)
        metrics = CollectorRegistry()
        engine = engine or SimEngine(name, config, VOCABULARY)
        served = KvloomConfig(model=ModelConfig(name=name), shard=config)
        server = ShardServer(served, engine, self.shard_tokenizer, f"{name}-0", metrics_registry=metrics)
        address = await server.start()
        stop = asyncio.Event()
        serving = asyncio.create_task(server.serve(stop))

        async def end() -> None:
            stop.set()
            await asyncio.wait_for(serving, TIMEOUT_SECONDS)

        self._cleanup.push_async_callback(end)
        await self.registry.announce(ShardRecord(f"{name}-0", address, name, server.incarnation_id))
        return metrics

    @property
    def sums(self) -> GapSums:
        """As a scraper reads them."""
        samples = [
            (sample.name, sample.labels, sample.value) for family in self.metrics.collect() for sample in family.samples
        ]
        return gap_sums_of(samples, MODEL, CANDIDATE)

    def skipped(self, reason: str) -> float:
        return self.metric("kvloom_router_shadow_skipped_total", **PAIR, reason=reason)


@contextlib.asynccontextmanager
async def shadow_world(
    redis_url: str, tokenizer: ModelTokenizer, others: Sequence[ModelTokenizer] = ()
) -> AsyncIterator[ShadowWorld]:
    world = ShadowWorld(redis_url, tokenizer, *others)
    try:
        yield world
    finally:
        await world.close()
