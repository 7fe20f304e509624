"""Drives the torch engine's step loop in virtual time, without threads: what several tests of it share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Literal

from kvloom_common.config import SpeculationConfig
from shard_server.engines.base import (
    BlockRemoved,
    BlockStored,
    EngineRequest,
    SequenceFinishReason,
    SequenceStart,
    StepOutput,
    TokenLogprobs,
)
from shard_server.engines.torch_engine.block_pool import BlockPool
from shard_server.engines.torch_engine.model_runner import Runner
from shard_server.engines.torch_engine.sampling.guides import GuideState
from shard_server.engines.torch_engine.scheduler import Scheduler
from shard_server.engines.torch_engine.step_loop import StepLoop


@dataclasses.dataclass
class Answer:
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    reason: SequenceFinishReason | None = None
    error: str = ""
    start: SequenceStart | None = None
    embedding: bytes = b""


class StepBench:
    """A step loop on any runner; collects answers, replays KV events and checks integrity after every step."""

    def __init__(
        self,
        runner: Runner,
        *,
        block_size: int,
        num_blocks: int,
        max_batch: int = 16,
        budget: int = 512,
        queue_order: Literal["fcfs", "shortest_prefill"] = "fcfs",
        speculation: SpeculationConfig | None = None,
        overlaps: bool = True,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.pool, max_batch=max_batch, max_prefill_tokens_per_step=budget, queue_order=queue_order
        )
        self.clock = 0.0
        self.loop = StepLoop(runner, self.scheduler, speculation=speculation, overlaps=overlaps, clock=self._tick)
        self.answers: dict[str, Answer] = {}
        self.replayed: set[int] = set()

    def add(self, *requests: EngineRequest, guides: Mapping[str, Future[GuideState]] | None = None) -> None:
        """`guides`: by request id."""
        for request in requests:
            self.answers[request.request_id] = Answer()
            self.loop.add(request, self.clock, None if guides is None else guides.get(request.request_id))

    def step(self) -> StepOutput | None:
        output = self.loop.step()
        self.scheduler.check_integrity()
        if output is not None:
            self._collect(output)
        return output

    def run(self, *requests: EngineRequest, max_steps: int = 3000) -> dict[str, Answer]:
        self.add(*requests)
        for _ in range(max_steps):
            if not self.loop.has_work:
                return self.answers
            self.step()
        raise AssertionError(f"work is left after {max_steps} steps")

    def _collect(self, output: StepOutput) -> None:
        for start in output.starts:
            assert self.answers[start.request_id].start is None
            self.answers[start.request_id].start = start
        for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            answer = self.answers[request_id]
            assert answer.reason is None, "a token behind the end"
            answer.token_ids += token_ids
            answer.logprobs += output.logprobs.get(request_id, [])
        for end in output.ends:
            assert self.answers[end.request_id].reason is None, "ended twice"
            self.answers[end.request_id].reason = end.reason
            self.answers[end.request_id].error = end.error
            self.answers[end.request_id].embedding = end.embedding
        for event in output.kv_events:
            if isinstance(event, BlockStored):
                self.replayed |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.replayed -= set(event.block_hashes)

    def _tick(self) -> float:
        self.clock += 0.01
        return self.clock


def same(answer: Answer, expected: Answer) -> bool:
    return (answer.token_ids, answer.logprobs, answer.reason) == (
        expected.token_ids,
        expected.logprobs,
        expected.reason,
    )
