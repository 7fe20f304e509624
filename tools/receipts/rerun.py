"""Computes an answer again, on an engine of this machine, by the code with which a shard does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvloom.errors import KvloomError
from kvloom.v1.generation_pb2 import Choice, SequenceFinish
from kvloom.v1.shard_service_pb2 import (
    AdapterRef,
    ShardInfo,
    ShardServiceConnectRequest,
    ShardServiceConnectResponse,
    ShardSubmit,
)
from kvloom_common.config import KvloomConfig
from kvloom_common.receipts.receipt import Output, RequestedGeneration, output_of, pooling_of, sampling_of, stop_of
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engine_multiplexer import EngineMultiplexer
from shard_server.engines.base import Engine, adapters_of
from shard_server.engines.create import create_engine
from shard_server.metrics import ShardMetrics

WAIT_SECONDS = 600.0
"""For one answer."""


class Rerunner:
    """One engine. Answers are computed one after another."""

    def __init__(self, engine: Engine, tokenizer: ModelTokenizer) -> None:
        """`engine` has started."""
        info = engine.info
        metrics = ShardMetrics(info.model, info.block_size, info.num_blocks, CollectorRegistry())
        shard = ShardInfo(model=info.model, variant=info.variant)
        self.variant = info.variant
        self._engine = engine
        self._multiplexer = EngineMultiplexer(engine, tokenizer, shard, metrics, max_waiting=16)
        self._frames: asyncio.Queue[ShardServiceConnectResponse] = asyncio.Queue()
        self._connection = self._multiplexer.connect("receipts")
        self._slots = itertools.count(1)

    async def write(self, frame: ShardServiceConnectResponse) -> None:
        """Takes the shard's frames, as its stream would."""
        self._frames.put_nowait(frame)

    async def run(self) -> None:
        """Runs until it is cancelled. Raises EngineError when the engine dies."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._multiplexer.run())
            tasks.create_task(self._connection.write_frames(self))

    async def add_adapters(self, paths: Mapping[str, Path]) -> None:
        """By name. Raises EngineError if the engine cannot have one of them."""
        await self._multiplexer.adapters.use(self._engine)
        for name, path in paths.items():
            await self._multiplexer.adapters.add_configured(name, str(path.absolute()))

    def adapter_checksum(self, name: str) -> str:
        """ "" if there is none of this name."""
        adapters = adapters_of(self._engine)
        found = None if adapters is None else adapters.find(name)
        return "" if found is None else found.checksum

    async def output(self, wanted: RequestedGeneration, adapter: str) -> list[Output]:
        """The choices that this engine computes for the request, with its own adapter of that name ("": none). Raises
        KvloomError if it refuses or fails it, ValueError if the request cannot be read."""
        slots = {next(self._slots): index for index in wanted.indexes}
        submit = ShardSubmit(
            request_id=f"rerun-{min(slots)}",
            attempt_id=1,
            prompt_token_ids=wanted.prompt_token_ids,
            sampling=sampling_of(wanted),
            stop=stop_of(wanted),
            choices=[Choice(slot=slot, index=index) for slot, index in slots.items()],
            cache_salt="receipts",
        )
        pooling = pooling_of(wanted)
        if pooling is not None:
            submit.pooling.CopyFrom(pooling)
        if adapter:
            submit.adapter.CopyFrom(AdapterRef(name=adapter, checksum=self.adapter_checksum(adapter)))
        self._multiplexer.receive(self._connection, ShardServiceConnectRequest(submits=[submit]))
        token_ids: dict[int, list[int]] = {slot: [] for slot in slots}
        finishes: dict[int, SequenceFinish] = {}
        async with asyncio.timeout(WAIT_SECONDS):
            while len(finishes) < len(slots):
                step = (await self._frames.get()).step
                counts: Sequence[int] = step.num_tokens or [1] * len(step.slots)
                position = 0
                for slot, count in zip(step.slots, counts, strict=True):
                    token_ids[slot] += step.token_ids[position : position + count]
                    position += count
                finishes |= {finish.slot: finish for finish in step.finishes}
        return [_output(slots[slot], token_ids[slot], finishes[slot]) for slot in slots]


def _output(index: int, token_ids: list[int], finish: SequenceFinish) -> Output:
    """Raises KvloomError."""
    if finish.HasField("error"):
        raise KvloomError.from_proto(finish.error)
    return output_of(index, token_ids, finish.reason, finish.stop_string, finish.embedding)


@contextlib.asynccontextmanager
async def rerunner(config: KvloomConfig, adapters: Mapping[str, Path]) -> AsyncIterator[Rerunner]:
    """`config.model.path` is the model; `adapters` are directories by name. Raises EngineError, OSError, ValueError if
    they cannot be loaded."""
    tokenizer = await asyncio.to_thread(ModelTokenizer.load, Path(config.model.path))
    engine = await asyncio.to_thread(create_engine, config, tokenizer)
    await engine.start()
    try:
        found = Rerunner(engine, tokenizer)
        running = asyncio.create_task(found.run(), name="rerun")
        try:
            await found.add_adapters(adapters)
            yield found
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        await engine.close()
        tokenizer.close()
