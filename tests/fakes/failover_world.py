"""A real router and real shard servers in one process, each shard behind a proxy whose connections can be broken."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from kvloom.router_link.link import GrpcRouterLink
from kvloom.v1.generation_pb2 import SequenceFinish, StopConditions, TokenLogprobs
from kvloom_common.config import KvloomConfig, ShardConfig
from kvloom_common.discovery.records import ShardRecord
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Engine
from shard_server.server import ShardServer
from tests.fakes.breaking_proxy import BreakingProxy
from tests.fakes.failing_engine import FailingEngine
from tests.fakes.link_requests import link_request
from tests.fakes.router_world import Answer, RouterWorld

MODEL = "model"
TIMEOUT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """Everything that a client receives for one choice, except what depends on the cache and on time."""

    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[tuple[float, Sequence[int], Sequence[float]]]
    reason: int
    stop_string: str
    num_prompt_tokens: int
    num_output_tokens: int
    error_reason: int


class Collected(Answer):
    """An answer that also keeps the top logprobs, and that a test can wait for."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._top_logprobs: list[list[tuple[float, Sequence[int], Sequence[float]]]] = [[] for _ in range(n)]
        self._changed = asyncio.Event()

    def on_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        super().on_tokens(index, delta, token_ids, logprobs)
        self._top_logprobs[index].extend((x.logprob, tuple(x.top_token_ids), tuple(x.top_logprobs)) for x in logprobs)
        self._changed.set()

    def on_finish(self, index: int, finish: SequenceFinish) -> None:
        super().on_finish(index, finish)
        self._changed.set()

    async def has_tokens(self, count: int) -> None:
        """Returns once every choice has `count` tokens or has ended."""
        await self._until(lambda: all(f or len(t) >= count for f, t in zip(self.finishes, self.token_ids, strict=True)))

    async def ended(self) -> list[Ended]:
        await self._until(lambda: self.done)
        return [
            Ended(
                tuple(self.token_ids[index]),
                self.texts[index],
                tuple(self._top_logprobs[index]),
                finish.reason,
                finish.stop_string,
                finish.num_prompt_tokens,
                finish.num_output_tokens,
                finish.error.reason,
            )
            for index, finish in enumerate(self.finishes)
            if finish is not None
        ]

    async def _until(self, reached: Any) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not reached():
                self._changed.clear()
                await self._changed.wait()


@dataclasses.dataclass
class Member:
    """A shard of the fleet."""

    shard_id: str
    engine: FailingEngine
    proxy: BreakingProxy
    metrics: CollectorRegistry
    stop: asyncio.Event
    serving: asyncio.Task[None]

    def metric(self, name: str, **labels: str) -> float:
        model = "model_name" if name.startswith("vllm:") else "model"
        return self.metrics.get_sample_value(name, {model: MODEL, **labels}) or 0.0


class FailoverWorld(RouterWorld):
    """The router and the shards share one tokenizer."""

    def __init__(self, redis_url: str, tokenizer: ModelTokenizer) -> None:
        super().__init__(redis_url)
        self.tokenizer = tokenizer
        self.config.model.name = MODEL
        self.config.router.health.enabled = False  # The router notices each of these faults without health checks.
        self.config.router.overload.outage_patience_seconds = 0.0
        self.members: dict[str, Member] = {}
        self.link: GrpcRouterLink

    async def start_router(self) -> None:
        await super().start_router()
        self.link = await self.connect()

    async def add_shard(self, shard_id: str, engine: Engine, config: ShardConfig) -> Member:
        """Starts a shard and registers it under its proxy's address."""
        served = KvloomConfig(model=self.config.model, shard=config)
        failing = FailingEngine(engine)
        metrics = CollectorRegistry()
        server = ShardServer(served, failing, self.tokenizer, shard_id, metrics_registry=metrics)
        proxy = BreakingProxy(await server.start())
        stop = asyncio.Event()
        serving = asyncio.create_task(server.serve(stop))
        member = Member(shard_id, failing, proxy, metrics, stop, serving)
        self._cleanup.push_async_callback(self._stop_member, member)
        await proxy.start()
        await self.registry.announce(ShardRecord(shard_id, proxy.address, MODEL, server.incarnation_id))
        self.members[shard_id] = member
        return member

    def hold(self, num_tokens: int | None) -> None:
        """Lets all shards wait once each of their sequences has so many tokens, and go on with None."""
        for member in self.members.values():
            member.engine.hold(num_tokens)

    def begin(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Collected:
        answer = Collected(fields.get("n", 1))
        self.submit(prompt, max_tokens, answer, **fields)
        return answer

    def submit(self, prompt: Sequence[int], max_tokens: int, answer: Collected, **fields: Any) -> int:
        stop = StopConditions(max_tokens=max_tokens, **fields.pop("stop", {}))
        model = fields.pop("model", MODEL)
        request = link_request("", model, prompt, "", fields.pop("sampling"), stop, **fields)
        return self.link.submit(request, answer)

    def metered(self) -> Mapping[str, float]:
        """Returns the usage that has been metered so far."""
        counts = {"requests": 0.0, "output_tokens": 0.0, "attempts": 0.0}
        for metric in self.metrics.collect():
            for sample in metric.samples:
                if sample.name == "kvloom_router_requests_total":
                    counts["requests"] += sample.value
                elif sample.name == "kvloom_router_attempts_total":
                    counts["attempts"] += sample.value
                elif sample.name == "kvloom_router_tokens_total" and sample.labels["token_type"] == "output":
                    counts["output_tokens"] += sample.value
        return counts

    @staticmethod
    async def _stop_member(member: Member) -> None:
        await member.proxy.stop()
        member.stop.set()
        await asyncio.wait_for(asyncio.gather(member.serving, return_exceptions=True), TIMEOUT_SECONDS)


@contextlib.asynccontextmanager
async def failover_world(redis_url: str, tokenizer: ModelTokenizer) -> AsyncIterator[FailoverWorld]:
    world = FailoverWorld(redis_url, tokenizer)
    try:
        yield world
    finally:
        await world.close()
