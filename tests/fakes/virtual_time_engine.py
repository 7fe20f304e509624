"""The torch engine's scheduler and step loop around a fake model that takes as long as a test says, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from shard_server.engines.base import EngineError, EngineInfo, EngineRequest, StepOutput
from shard_server.engines.torch_engine.block_pool import BlockPool
from shard_server.engines.torch_engine.model_runner import ScheduledSequence
from shard_server.engines.torch_engine.scheduler import Scheduler
from shard_server.engines.torch_engine.step_loop import StepLoop
from tests.fakes.fake_model_runner import VOCAB_SIZE, FakeModelRunner

BLOCK_SIZE = 16


class VirtualTimeEngine:
    """A step takes `1 / prefill_tokens_per_second` for each prompt token and `seconds_per_sequence` for each sequence
    that decodes. The engine dies in the first step of more than `dies_above` sequences."""

    def __init__(
        self,
        prefill_tokens_per_second: float,
        seconds_per_sequence: float,
        *,
        num_blocks: int = 1024,
        max_batch: int = 32,
        dies_above: int = 1000,
    ) -> None:
        self.now = 0.0
        self._seconds_per_token = 1 / prefill_tokens_per_second
        self._seconds_per_sequence = seconds_per_sequence
        self._dies_above = dies_above
        runner = FakeModelRunner(block_size=BLOCK_SIZE, num_blocks=num_blocks)
        runner.before_run = self._spend
        scheduler = Scheduler(BlockPool(num_blocks, BLOCK_SIZE), max_batch=max_batch, max_prefill_tokens_per_step=512)
        self._step_loop = StepLoop(runner, scheduler, clock=self.clock)
        speed = self._step_loop.warm_up(256)
        self.info = EngineInfo(
            engine="virtual",
            model="fake",
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_batch=max_batch,
            max_model_len=runner.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset(),
            capabilities=frozenset(),
            prefill_tokens_per_second=speed.prefill_tokens_per_second,
            decode_step_seconds=speed.decode_step_seconds,
        )
        self._wakes = asyncio.Event()
        self.is_closed = False

    def clock(self) -> float:
        return self.now

    async def start(self) -> None:
        """Nothing to load."""

    def submit(self, request: EngineRequest) -> None:
        self._step_loop.add(request, self.now)
        self._wakes.set()

    def cancel(self, request_id: str) -> None:
        self._step_loop.cancel(request_id)
        self._wakes.set()

    async def steps(self) -> AsyncIterator[StepOutput]:
        while True:
            while self._step_loop.has_work:
                if (output := self._step_loop.step()) is not None:
                    yield output
            self._wakes.clear()
            await self._wakes.wait()

    async def close(self) -> None:
        self.is_closed = True

    def _spend(self, batch: list[ScheduledSequence]) -> None:
        if len(batch) > self._dies_above:
            raise EngineError("the engine has died: out of luck")
        for scheduled in batch:
            num_tokens = len(scheduled.token_ids)
            self.now += self._seconds_per_sequence if num_tokens == 1 else num_tokens * self._seconds_per_token
