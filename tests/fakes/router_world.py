"""A router in this process, with fake shards, a fake safety service and real clients around it, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence

import grpc
from prometheus_client import CollectorRegistry

from kvloom.router_link.link import GrpcRouterLink, LinkRequest, RouterLink
from kvloom.v1 import generation_pb2, router_service_pb2_grpc
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.records import ShardRecord
from kvloom_common.discovery.registry import ShardRegistry
from router.core.core import RouterCore
from router.core_settings import core_config
from router.process import new_core
from router.server import RouterServer
from tests.fakes import link_requests
from tests.fakes.fake_safety import FakeSafety
from tests.fakes.fake_shard import FakeShard
from tests.fakes.served_models import catalogue_of
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.waiting import eventually

MODEL = "tiny"
TIMEOUT_SECONDS = 10.0
FLEET_TIMEOUT_SECONDS = 30.0

_prefixes = itertools.count(1)


class Answer:
    """A sink that keeps everything it receives, by choice."""

    def __init__(self, n: int = 1) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(n)]
        self.texts = [""] * n
        self.logprobs: list[list[float]] = [[] for _ in range(n)]
        self.starts: list[generation_pb2.SequenceStart | None] = [None] * n
        self.finishes: list[generation_pb2.SequenceFinish | None] = [None] * n

    def on_start(self, index: int, start: generation_pb2.SequenceStart) -> None:
        assert self.starts[index] is None, "started twice"
        self.starts[index] = start

    def on_tokens(
        self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[generation_pb2.TokenLogprobs]
    ) -> None:
        assert self.finishes[index] is None, "tokens after the finish"
        self.token_ids[index].extend(token_ids)
        self.texts[index] += delta
        self.logprobs[index].extend(entry.logprob for entry in logprobs)

    def on_finish(self, index: int, finish: generation_pb2.SequenceFinish) -> None:
        assert self.finishes[index] is None, "finished twice"
        self.finishes[index] = finish

    @property
    def done(self) -> bool:
        return all(self.finishes)

    @property
    def finish(self) -> generation_pb2.SequenceFinish:
        """The finish of the first choice."""
        assert self.finishes[0] is not None
        return self.finishes[0]


def link_request(prompt: Sequence[int], max_tokens: int, **fields) -> LinkRequest:
    """A request with an id of its own for MODEL, for so many tokens."""
    stop = fields.pop("stop", None) or generation_pb2.StopConditions(max_tokens=max_tokens)
    return link_requests.link_request(
        **{"request_id": "", "model": MODEL, "prompt_token_ids": prompt, "stop": stop, **fields}
    )


class RouterWorld:
    """Everything that a test of the router touches; `router_world` creates and closes it."""

    def __init__(self, redis_url: str) -> None:
        self.config = KvloomConfig()
        self.config.model.name = MODEL
        self.config.redis.url = redis_url
        self.config.redis.key_prefix = f"router-test-{next(_prefixes)}"
        self.config.fabric.drain_timeout_seconds = 5.0
        self.config.safety.on_unavailable = "allow"
        self.tokenizer = model_tokenizer()
        self.metrics = CollectorRegistry()
        self.registry = ShardRegistry(redis_url, self.config.redis.key_prefix)
        self.address = ""
        self.server: RouterServer
        self.stop = asyncio.Event()
        self.served: asyncio.Task[None] | None = None
        self._cleanup = contextlib.AsyncExitStack()

    async def start_safety(self, **options) -> FakeSafety:
        """Starts a safety service, without which requests are refused. Call this before the router starts."""
        self.config.safety.on_unavailable = "refuse"
        self.config.safety.port = 0
        return await self.start_another_safety(**options)

    async def start_another_safety(self, **options) -> FakeSafety:
        """Starts a safety service at the port of the first one, which has been stopped or shares its port."""
        safety = FakeSafety(**options)
        self.config.safety.port = await safety.start(self.config.safety.port)
        self._cleanup.push_async_callback(safety.stop)
        return safety

    async def start_shard(
        self, shard_id: str, announced_as: str = "", announced_incarnation_id: str = "", **options
    ) -> FakeShard:
        shard = FakeShard(shard_id, **{"model": MODEL, **options})
        await shard.start()
        self._cleanup.push_async_callback(shard.stop)
        incarnation_id = announced_incarnation_id or shard.info.incarnation_id
        record = ShardRecord(announced_as or shard_id, shard.address, shard.info.model, incarnation_id)
        await self.registry.announce(record)
        return shard

    async def start_router(self) -> None:
        await self.bind_router()
        self.serve_router()

    async def bind_router(self) -> None:
        """Makes a router that has its port and has not opened it yet."""
        is_recorded = self.config.router.records_incidents
        core = new_core(self.config, "router-0") if is_recorded else RouterCore(core_config(self.config))
        self.server = RouterServer(
            self.config, core, catalogue_of(self.config, self.tokenizer), "router-0", self.metrics
        )
        self.address = await self.server.start("127.0.0.1", 0)

    def serve_router(self) -> None:
        self.served = asyncio.create_task(self.server.serve(self.stop))
        self._cleanup.push_async_callback(self._stop_router)

    async def connect(self, client_id: str = "edge-0") -> GrpcRouterLink:
        link = GrpcRouterLink(self.address, client_id)
        await link.start()
        self._cleanup.push_async_callback(link.close)
        await eventually(lambda: link.connected, "the client's connection")
        return link

    async def stub(self) -> router_service_pb2_grpc.RouterServiceStub:
        channel = grpc.aio.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._cleanup.push_async_callback(channel.close)
        return router_service_pb2_grpc.RouterServiceStub(channel)

    async def ask(self, link: GrpcRouterLink, prompt: Sequence[int], max_tokens: int, **fields) -> Answer:
        answer = Answer(fields.get("n", 1))
        link.submit(link_request(prompt, max_tokens, **fields), answer)
        await eventually(lambda: answer.done, "the answer's end")
        return answer

    async def wait_for_shards(self, link: GrpcRouterLink, count: int) -> None:
        async with asyncio.timeout(FLEET_TIMEOUT_SECONDS):
            while num_ready_shards(link) != count:
                await link.wait_fleet_change()

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.get_sample_value(name, labels) or 0.0

    async def close(self) -> None:
        await self._cleanup.aclose()
        await self.registry.close()

    async def _stop_router(self) -> None:
        assert self.served is not None
        self.stop.set()
        await asyncio.wait_for(self.served, TIMEOUT_SECONDS)


def num_ready_shards(link: RouterLink) -> int:
    return sum(model.num_ready_shards for model in link.fleet.models)


@contextlib.asynccontextmanager
async def router_world(redis_url: str) -> AsyncIterator[RouterWorld]:
    world = RouterWorld(redis_url)
    try:
        yield world
    finally:
        await world.close()
