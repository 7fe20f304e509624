"""A shard server on a loopback port, and a router's end of its stream that records and checks every frame."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from kvloom.v1 import generation_pb2, kv_event_pb2, shard_service_pb2, shard_service_pb2_grpc
from kvloom_common.config import KvloomConfig, ModelConfig, ShardConfig, SimConfig
from shard_server.engines.base import Engine
from shard_server.engines.sim_engine import SimEngine
from shard_server.server import ShardServer

EOS = 2
VOCABULARY = 49152
TIMEOUT_SECONDS = 20.0


class WordTokenizer:
    """A tokenizer in which every token is a word of its own, and end-of-sequence is special and has no text."""

    token_texts: Sequence[str | None] = ["" if i == EOS else f" w{i}" for i in range(VOCABULARY)]

    def shown_bytes(self, token_id: int) -> bytes:
        return (self.token_texts[token_id] or "").encode()

    def token_bytes(self, token_id: int) -> bytes:
        return b"</s>" if token_id == EOS else self.shown_bytes(token_id)


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(f" w{token_id}" for token_id in token_ids)


def sim_config(step_ms: float = 1.0, **shard_fields: Any) -> KvloomConfig:
    sim = SimConfig(step_ms=step_ms, prefill_tokens_per_second=1e7)
    return KvloomConfig(model=ModelConfig(name="model"), shard=ShardConfig(engine="sim", sim=sim, **shard_fields))


@dataclasses.dataclass
class ShardWorld:
    server: ShardServer
    address: str
    stop: asyncio.Event
    serving: asyncio.Task[None]
    channel: grpc.aio.Channel
    stub: shard_service_pb2_grpc.ShardServiceStub
    metrics: CollectorRegistry

    async def router(self, name: str = "router") -> RouterEnd:
        """Returns a new stream that has received its hello."""
        router = RouterEnd(self.stub)
        await router.write(hello=shard_service_pb2.RouterHello(router_id=name))
        await router.read()
        return router


@contextlib.asynccontextmanager
async def shard_world(
    config: KvloomConfig | None = None, engine: Engine | None = None, shard_id: str = "shard-0", **server_fields: Any
) -> AsyncIterator[ShardWorld]:
    """A shard that sleeps does not look for garbage, of which a process of pytest has half a second's worth."""
    server_fields.setdefault("free_memory", lambda: None)
    config = config or sim_config()
    metrics = CollectorRegistry()
    engine = engine or SimEngine("model", config.shard, VOCABULARY, frozenset({EOS}))
    server = ShardServer(config, engine, WordTokenizer(), shard_id, metrics_registry=metrics, **server_fields)
    address = await server.start()
    stop = asyncio.Event()
    serving = asyncio.create_task(server.serve(stop))
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = shard_service_pb2_grpc.ShardServiceStub(channel)
        world = ShardWorld(server, address, stop, serving, channel, stub, metrics)
        try:
            yield world
        finally:
            await channel.close()
            stop.set()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await asyncio.gather(serving, return_exceptions=True)


class RouterEnd:
    """A router's view of one shard. It asserts what must hold for every frame."""

    def __init__(self, stub: shard_service_pb2_grpc.ShardServiceStub) -> None:
        self.call = stub.Connect()
        self.info = shard_service_pb2.ShardInfo()
        self.load = shard_service_pb2.LoadReport()
        self.adapters: dict[str, shard_service_pb2.AdapterState] = {}
        self.tokens: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.logprobs: dict[int, list[generation_pb2.TokenLogprobs]] = {}
        self.starts: dict[int, generation_pb2.SequenceStart] = {}
        self.finishes: dict[int, generation_pb2.SequenceFinish] = {}
        self.frames: list[shard_service_pb2.ShardServiceConnectResponse] = []
        self.snapshots: list[kv_event_pb2.KvSnapshot] = []
        self.cached: set[int] = set()
        self.kv_number: int | None = None

    async def write(self, **fields: Any) -> None:
        await self.call.write(shard_service_pb2.ShardServiceConnectRequest(**fields))

    async def submit(self, slot: int, prompt: Sequence[int], **fields: Any) -> None:
        await self.write(submits=[submit_of(slot, prompt, **fields)])

    async def read(self) -> shard_service_pb2.ShardServiceConnectResponse:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            frame = await self.call.read()
        assert isinstance(frame, shard_service_pb2.ShardServiceConnectResponse), "the stream has ended"
        self._take(frame)
        return frame

    async def read_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            await self.read()

    async def finish_of(self, slot: int) -> generation_pb2.SequenceFinish:
        await self.read_until(lambda: slot in self.finishes)
        return self.finishes[slot]

    def forget(self, slot: int) -> None:
        """Forgets the slot's earlier sequence because the slot is about to be reused."""
        for kept in (self.tokens, self.text, self.starts, self.finishes, self.logprobs):
            kept.pop(slot, None)

    def _take(self, frame: shard_service_pb2.ShardServiceConnectResponse) -> None:
        self.frames.append(frame)
        if frame.HasField("hello"):
            assert len(self.frames) == 1
            assert frame.HasField("kv_snapshot")
            self.info = frame.hello.info
        if frame.HasField("kv_snapshot"):
            self.snapshots.append(frame.kv_snapshot)
            if self.kv_number is not None:
                assert frame.kv_snapshot.number == self.kv_number
                assert set(frame.kv_snapshot.block_hashes) == self.cached
            self.kv_number = frame.kv_snapshot.number
            self.cached = set(frame.kv_snapshot.block_hashes)
        if frame.HasField("kv_events"):
            self._take_kv_events(frame.kv_events)
        for batch in frame.more_kv_events:
            self._take_kv_events(batch)
        if frame.HasField("load"):
            self.load = frame.load
        if frame.HasField("adapters"):
            self.adapters = {adapter.name: adapter for adapter in frame.adapters.adapters}
        self._take_step(frame.step)

    def _take_kv_events(self, batch: kv_event_pb2.KvEventBatch) -> None:
        assert self.kv_number is not None
        assert batch.number == self.kv_number + 1
        self.kv_number = batch.number
        for event in batch.events:
            self.cached |= set(event.block_stored.block_hashes)
            self.cached -= set(event.block_removed.block_hashes)
            if event.HasField("all_blocks_cleared"):
                self.cached.clear()

    def _take_step(self, step: generation_pb2.StepFrame) -> None:
        num_tokens = step.num_tokens or [1] * len(step.slots)
        assert len(num_tokens) == len(step.slots) == len(step.deltas) == len(set(step.slots))
        assert sum(num_tokens) == len(step.token_ids)
        for start in step.starts:
            assert start.slot not in self.starts
            self.starts[start.slot] = start
        position = 0
        for slot, count, delta in zip(step.slots, num_tokens, step.deltas, strict=True):
            assert slot not in self.finishes, "tokens after the finish"
            self.tokens.setdefault(slot, []).extend(step.token_ids[position : position + count])
            self.text[slot] = self.text.get(slot, "") + delta
            position += count
        for entry in step.logprobs:
            self.logprobs.setdefault(entry.slot, []).append(entry)
        for finish in step.finishes:
            assert finish.slot not in self.finishes, "finished twice"
            self.finishes[finish.slot] = finish


def submit_of(slot: int, prompt: Sequence[int], max_tokens: int = 8, seed: int = 7, **fields: Any) -> Any:
    """Returns a submit of one choice; keywords override fields of ShardSubmit, StopConditions and SamplingParams."""
    choice = generation_pb2.Choice(
        slot=slot,
        output_token_ids=fields.pop("output_token_ids", ()),
        num_delivered_chars=fields.pop("num_delivered_chars", 0),
    )
    stop_names = {"stop", "stop_token_ids", "ignore_eos", "min_tokens"}
    stop = {name: fields.pop(name) for name in stop_names & fields.keys()}
    submit_names = {"request_id", "attempt_id", "cache_salt", "choices", "adapter"}
    submit = {name: fields.pop(name) for name in submit_names & fields.keys()}
    return shard_service_pb2.ShardSubmit(
        **{
            "request_id": f"request-{slot}",
            "attempt_id": 1,
            "prompt_token_ids": prompt,
            "sampling": generation_pb2.SamplingParams(seed=seed, **fields),
            "stop": generation_pb2.StopConditions(max_tokens=max_tokens, **stop),
            "choices": [choice],
            **submit,
        }
    )
