"""An edge, a router and the shards of two models with tokenizers and chat templates of their own, in one process. Both
models recite the same text, so that a test can tell the right continuation from any other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from prometheus_client import CollectorRegistry

from edge_http.edge import Edge
from edge_http.server.http_server import EdgeServer
from kvloom.router_link.group import RouterGroup
from kvloom_common.config import KvloomConfig, ModelConfig, RouteConfig, ShardConfig, SimConfig
from kvloom_common.discovery.records import ShardRecord
from kvloom_common.discovery.registry import ShardRegistry
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.models.model_routes import ModelRoutes
from kvloom_common.models.served_model import ServedModel
from kvloom_common.tenancy.table import TenantTable
from kvloom_common.text.chat_template import ChatTemplate
from kvloom_common.text.tokenizer import ModelTokenizer
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from kvloom_common.trust.secret import FabricSecret
from kvloom_common.trust.shared_secret import SharedSecret
from router.core.core import RouterCore
from router.core.tenancy.limiter import Limiter
from router.core_settings import core_config
from router.server import RouterServer
from router.tenancy.lease_client import epoch_clock
from shard_server.server import ShardServer
from tests.fakes.failing_engine import FailingEngine, RecitingEngine
from tests.fakes.router_world import TIMEOUT_SECONDS, RouterWorld, num_ready_shards
from tests.fakes.tiny_tokenizer import byte_fallback_tokenizer, model_tokenizer
from tests.waiting import eventually

FIRST, SECOND = "first", "second"
ROUTE = RouteConfig(name="chat", targets=[FIRST], fallback=[SECOND], on_loss="continue")
VOCABULARY = 49_152
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


class _Reciter(RecitingEngine):
    """Recites to every prompt."""

    def token_at(self, prompt: Sequence[int], seed: int, position: int) -> int:
        return self._recital[position % len(self._recital)]


class TwoModelsWorld(RouterWorld):
    """`engines` has that of each model's one shard, `served_models` what the edge and the router know of the models."""

    def __init__(self, redis_url: str, text: str) -> None:
        super().__init__(redis_url)
        self.config.router.health.enabled = False
        self.config.router.overload.outage_patience_seconds = 0.0
        self.text = text
        other = ModelTokenizer(byte_fallback_tokenizer(), template=ChatTemplate(PLAIN, {}))
        self.tokenizers = {FIRST: model_tokenizer(), SECOND: other}
        self.served_models = {
            name: ServedModel(name, tokenizer, 0, "fp") for name, tokenizer in self.tokenizers.items()
        }
        self.engines: dict[str, FailingEngine] = {}
        self._secret: FabricSecret | None = None
        self.edge: Edge
        self.url = ""

    def share_secret(self, secret: FabricSecret) -> None:
        """Called before anything starts."""
        self._secret = secret
        sealer = self._trust("router", "router-0").sealer
        self.registry = ShardRegistry(self.config.redis.url, self.config.redis.key_prefix, sealer)

    def _trust(self, role: str, name: str) -> FabricTrust:
        return NO_SECRET if self._secret is None else SharedSecret(self._secret, (role,), name)

    async def bind_router(self) -> None:
        limiter = Limiter(TenantTable, epoch_clock()) if self.config.control.enabled else None
        core = RouterCore(core_config(self.config), limiter=limiter)
        catalogue = Catalogue(list(self.served_models.values()))
        trust = self._trust("router", "router-0")
        self.server = RouterServer(self.config, core, catalogue, "router-0", self.metrics, trust=trust)
        self.address = await self.server.start("127.0.0.1", 0)

    async def add_fleet(self, name: str) -> None:
        """Starts the one shard of a model."""
        tokenizer = self.tokenizers[name]
        config = ShardConfig(engine="sim", sim=SimConfig(step_ms=1.0, prefill_tokens_per_second=1e7))
        recital = tokenizer.encode_now(self.text)
        engine = FailingEngine(_Reciter(name, config, VOCABULARY, recital, cue=0))
        served = KvloomConfig(model=ModelConfig(name=name), shard=config)
        trust = self._trust("shard", f"{name}-0")
        server = ShardServer(served, engine, tokenizer, f"{name}-0", metrics_registry=CollectorRegistry(), trust=trust)
        address = await server.start()
        stop = asyncio.Event()
        serving = asyncio.create_task(server.serve(stop))

        async def end() -> None:
            stop.set()
            await asyncio.wait_for(asyncio.gather(serving, return_exceptions=True), TIMEOUT_SECONDS)

        self._cleanup.push_async_callback(end)
        await self.registry.announce(ShardRecord(f"{name}-0", address, name, server.incarnation_id))
        self.engines[name] = engine

    def lose_first_after(self, num_tokens: int) -> None:
        """The first model's only engine fails each answer when it has so many tokens."""
        self.engines[FIRST].fails_at = lambda _: num_tokens

    def num_metered(self, model: str) -> float:
        """The output tokens that the router has metered for a model."""
        return sum(
            sample.value
            for family in self.metrics.collect()
            for sample in family.samples
            if sample.name == "kvloom_router_tokens_total"
            and sample.labels["token_type"] == "output"
            and sample.labels["model"] == model
        )


@contextlib.asynccontextmanager
async def two_models_world(
    redis_url: str, text: str, prepare: Callable[[TwoModelsWorld], None] = lambda _: None
) -> AsyncIterator[TwoModelsWorld]:
    """`prepare` may change the world's configuration and models before anything starts."""
    world = TwoModelsWorld(redis_url, text)
    prepare(world)
    try:
        await world.start_router()
        for name in (FIRST, SECOND):
            await world.add_fleet(name)
        link = RouterGroup("edge-0", [world.address])
        world._cleanup.push_async_callback(link.close)
        await link.start()
        await eventually(lambda: num_ready_shards(link) == 2, "both fleets")
        world.edge = Edge(KvloomConfig(), link, world.served_models, routes=ModelRoutes([ROUTE]))
        server = EdgeServer(world.edge)
        world.url = f"http://{await server.listen('127.0.0.1', 0)}"
        try:
            yield world
        finally:
            await server.stop()
    finally:
        await world.close()
