"""One engine iteration of an encoder: take waiting texts, embed, report. Synchronous; `engine.py` gives it a thread."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch

from shard_server.engines.base import (
    EngineLoad,
    EngineRequest,
    LoadShare,
    PoolingKind,
    SequenceEnd,
    SequenceFinishReason,
    SequenceStart,
    StepOutput,
)
from shard_server.engines.queue_order import admission_rank
from shard_server.engines.torch_engine.memory import is_out_of_memory
from shard_server.engines.torch_engine.pooling import PooledPrompt, packed_vector
from shard_server.engines.torch_engine.speed import StepSpeed

MAX_SECONDS_PER_STEP: Final = 1.0
"""Routers consider a shard stalled after a longer silence (`router.health.stall_seconds`)."""
_WARM_UP_TOKENS: Final = 64
_NUM_WARM_UPS: Final = 3


class HiddenStateRunner(Protocol):
    """Computes hidden states; see EncoderRunner."""

    def run(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]: ...


class _Waiting(NamedTuple):
    request: EngineRequest
    submit_time: float


class EncoderLoop:
    """The texts that wait, and the steps that embed them: whole ones, because each token sees all others."""

    def __init__(
        self,
        runner: HiddenStateRunner,
        *,
        num_blocks: int,
        max_batch: int,
        max_tokens_per_step: int,
        queue_order: Literal["fcfs", "shortest_prefill"] = "fcfs",
        default_pooling: PoolingKind = PoolingKind.MEAN,
        score: Callable[[torch.Tensor], torch.Tensor] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """A step embeds at most `max_batch` texts of at most `max_tokens_per_step` tokens together, or one text.
        `num_blocks` are reported as free, because texts leave nothing in memory. `score`: what makes one number of the
        hidden states of a text, instead of its embedding; None: there is none."""
        self._runner = runner
        self._num_blocks = num_blocks
        self._max_batch = max_batch
        self._max_tokens_per_step = max_tokens_per_step
        self._queue_order = queue_order
        self._default_pooling = default_pooling
        self._score = score
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._num_submitted = 0
        self._output = StepOutput()
        self._speed = StepSpeed()

    def warm_up(self, num_max_tokens: int) -> StepSpeed:
        """Embed a text of some tokens, at most `num_max_tokens`: routers need a speed to plan with, and the first call
        is slow."""
        text = [0] * min(_WARM_UP_TOKENS, num_max_tokens)
        for _ in range(_NUM_WARM_UPS):
            begin = self._clock()
            self._runner.run([text])
            self._speed = StepSpeed()
            self._speed.add(len(text), self._clock() - begin, num_decoding=0)
        return self._speed

    def add(self, request: EngineRequest, submit_time: float, _guide: Any = None, _adapter: Any = None) -> None:
        """Add a text; `submit_time` is in the clock's time."""
        self._num_submitted += 1
        self._waiting.append(_Waiting(request, submit_time))

    def cancel(self, request_id: str) -> None:
        """End a text that waits as CANCELLED in the next output; unknown ids are ignored."""
        for waiting in self._waiting:
            if waiting.request.request_id == request_id:
                self._waiting.remove(waiting)
                self._output.ends.append(SequenceEnd(request_id, SequenceFinishReason.CANCELLED))
                return

    @property
    def has_work(self) -> bool:
        """True while `step` has something to compute or to report."""
        return bool(self._waiting or self._output.ends)

    def step(self) -> StepOutput | None:
        """Embed some of the waiting texts; returns what has ended."""
        begin = self._clock()
        batch = self._take_batch()
        if batch:
            self._embed(batch, begin)
        output = self._output
        if not output.ends:
            return None
        output.load = self._load()
        self._output = StepOutput()
        return output

    def check_integrity(self) -> None:
        """There is nothing that could be lost: texts hold no blocks."""

    def _take_batch(self) -> list[_Waiting]:
        speed = self._speed.prefill_tokens_per_second
        budget = self._max_tokens_per_step
        if speed:
            budget = min(budget, int(speed * MAX_SECONDS_PER_STEP))
            if self._queue_order == "shortest_prefill" and len(self._waiting) > 1:
                ranks = {id(one): admission_rank(_size(one), speed, one.submit_time) for one in self._waiting}
                self._waiting = deque(sorted(self._waiting, key=lambda one: ranks[id(one)]))
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self._max_batch:
            budget -= _size(self._waiting[0])
            if batch and budget < 0:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _embed(self, batch: Sequence[_Waiting], begin: float) -> None:
        try:
            states = self._runner.run([one.request.prompt_token_ids for one in batch])
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # The step is retried without its longest text.
            longest = max(batch, key=_size)
            self._waiting.extendleft(one for one in reversed(batch) if one is not longest)
            self._output.ends.append(
                SequenceEnd(longest.request.request_id, SequenceFinishReason.ERROR, f"out of memory: {error}")
            )
            return
        for one, of_text in zip(batch, states, strict=True):
            self._end(one.request, of_text, begin - one.submit_time)
        self._speed.add(sum(map(_size, batch)), self._clock() - begin, num_decoding=0)

    def _end(self, request: EngineRequest, states: torch.Tensor, queue_time_seconds: float) -> None:
        if self._score is not None:
            vector = packed_vector(self._score(states), normalize=False)
        else:
            pooled = PooledPrompt(request, self._default_pooling)
            pooled.add(states, 0)
            vector = pooled.vector()
        if vector is None:
            problem = "the model's hidden states are not finite"
            self._output.ends.append(SequenceEnd(request.request_id, SequenceFinishReason.ERROR, problem))
            return
        self._output.starts.append(SequenceStart(request.request_id, 0, max(0.0, queue_time_seconds)))
        self._output.ends.append(SequenceEnd(request.request_id, SequenceFinishReason.STOP, embedding=vector))

    def _load(self) -> EngineLoad:
        shares: defaultdict[int, LoadShare] = defaultdict(LoadShare)
        for request, _ in self._waiting:
            share = shares[request.origin]
            share.num_waiting += 1
            share.num_queued_prefill_tokens += len(request.prompt_token_ids)
        return EngineLoad.of(
            shares,
            num_submitted=self._num_submitted,
            num_available_blocks=self._num_blocks,
            prefill_tokens_per_second=self._speed.prefill_tokens_per_second,
        )


def _size(waiting: _Waiting) -> int:
    return len(waiting.request.prompt_token_ids)
