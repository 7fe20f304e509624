"""One engine iteration: schedule → run → postprocess. Synchronous; `engine.py` gives it a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from shard_server.engines.base import EngineLoad, EngineRequest, FinishReason, SequenceEnd, SequenceStart, StepOutput
from shard_server.engines.torch_engine.model_runner import ScheduledSequence
from shard_server.engines.torch_engine.sampler import Drawn, SampleRow, sample
from shard_server.engines.torch_engine.scheduler import Chunk, Scheduler
from shard_server.engines.torch_engine.sequence import Sequence as EngineSequence
from shard_server.engines.torch_engine.speed import StepSpeed

_NUM_WARM_UPS = 2


class Runner(Protocol):
    """Computes logits; see ModelRunner."""

    def run(self, batch: Sequence[ScheduledSequence]) -> torch.Tensor: ...


class StepLoop:
    """The live sequences and what is computed for them, step by step."""

    def __init__(self, runner: Runner, scheduler: Scheduler, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._sequences: dict[str, EngineSequence] = {}
        self._num_submitted = 0
        self._output = StepOutput()
        self._speed = StepSpeed()

    def warm_up(self, num_tokens: int) -> None:
        """Prefill `num_tokens` tokens and decode one, in free blocks: the first request must not pay for first touches,
        and its router needs speeds to plan with."""
        block_table = range(-(-(num_tokens + 1) // self.scheduler.pool.block_size))
        prefill = ScheduledSequence([0] * num_tokens, 0, block_table, wants_logits=True)
        decode = ScheduledSequence([0], num_tokens, block_table, wants_logits=True)
        for _ in range(_NUM_WARM_UPS):  # only what the last one measures is kept: the first is cold
            self._speed = StepSpeed()
            for num_prefill_tokens, sequence in ((num_tokens, prefill), (0, decode)):
                begin = self._clock()
                self._runner.run([sequence])
                self._speed.add(num_prefill_tokens, self._clock() - begin, num_decoding=1 - bool(num_prefill_tokens))

    def add(self, request: EngineRequest, submit_time: float) -> None:
        """Take in a sequence; `submit_time` is the clock's."""
        sequence = EngineSequence(request, self.scheduler.pool.block_size, submit_time)
        self._sequences[request.request_id] = sequence
        self._num_submitted += 1
        self.scheduler.add(sequence)
        if (reason := _finish_reason(sequence)) is not None:  # resumed, and there is nothing left to generate
            self._end(sequence, reason)

    def cancel(self, request_id: str) -> None:
        """End a sequence as CANCELLED in the next output; unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, FinishReason.CANCELLED)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""
        return self.scheduler.has_work or bool(self._output.ends)

    def step(self) -> StepOutput | None:
        """Schedule, run, postprocess. None when the step brought nothing to tell (a part of a prompt)."""
        begin = self._clock()
        batch = self.scheduler.schedule(self._speed.prefill_tokens_per_second)
        if batch:
            logits = self._run(batch, begin)
            if logits is not None:
                self._postprocess(batch, logits)
                self._speed.add(_num_prefill_tokens(batch), self._clock() - begin, num_decoding=_num_decoding(batch))
        return self._take_output()

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and sequences account for one another."""
        self.scheduler.check_integrity()

    def _run(self, batch: list[Chunk], begin: float) -> torch.Tensor | None:
        """Logits of the sequences whose known tokens are all computed now; None when memory did not suffice."""
        scheduled: list[ScheduledSequence] = []
        for sequence, num_tokens in batch:
            if sequence.queue_time_seconds is None:
                sequence.queue_time_seconds = begin - sequence.submit_time
                sequence.num_reused_tokens = sequence.num_computed_tokens
            scheduled.append(_scheduled(sequence, num_tokens))
        try:
            return self._runner.run(scheduled)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            # Nothing counts as computed yet, so without the newest sequence the step can simply be tried again.
            self._end(batch[-1][0], FinishReason.ERROR, f"out of memory: {error}")
            return None

    def _postprocess(self, batch: list[Chunk], logits: torch.Tensor) -> None:
        complete: list[EngineSequence] = []
        for sequence, num_tokens in batch:
            self.scheduler.mark_computed(sequence, num_tokens)
            if not sequence.num_uncomputed_tokens:
                complete.append(sequence)
        if complete:
            drawn = sample(logits, [_sample_row(sequence) for sequence in complete])
            for index, sequence in enumerate(complete):
                self._take_token(sequence, drawn, index)

    def _take_token(self, sequence: EngineSequence, drawn: Drawn, index: int) -> None:
        token_id = drawn.token_ids[index]
        if token_id is None:
            self._end(sequence, FinishReason.ERROR, "the model's logits are not finite")
            return
        sequence.append(token_id)
        request_id = sequence.request.request_id
        output = self._output
        output.request_ids.append(request_id)
        output.token_ids.append([token_id])
        if index in drawn.logprobs:
            output.logprobs[request_id] = [drawn.logprobs[index]]
        if not sequence.started:
            sequence.started = True
            queue_time_seconds = sequence.queue_time_seconds or 0.0
            output.starts.append(SequenceStart(request_id, sequence.num_reused_tokens, queue_time_seconds))
        if (reason := _finish_reason(sequence)) is not None:
            self._end(sequence, reason)

    def _end(self, sequence: EngineSequence, reason: FinishReason, error: str = "") -> None:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.request.request_id]
        self._output.ends.append(SequenceEnd(sequence.request.request_id, reason, error))

    def _take_output(self) -> StepOutput | None:
        output = self._output
        output.kv_events = self.scheduler.pool.take_events()
        if not (output.request_ids or output.ends or output.kv_events):
            return None
        output.load = self._load()
        self._output = StepOutput()
        return output

    def _load(self) -> EngineLoad:
        scheduler = self.scheduler
        return EngineLoad.of(
            scheduler.load_shares(),
            num_submitted=self._num_submitted,
            num_available_blocks=scheduler.pool.num_available,
            num_preemptions=scheduler.num_preemptions,
            prefill_tokens_per_second=self._speed.prefill_tokens_per_second,
            decode_step_seconds=self._speed.decode_step_seconds,
        )


def _scheduled(sequence: EngineSequence, num_tokens: int) -> ScheduledSequence:
    start = sequence.num_computed_tokens
    end = start + num_tokens
    complete = end == sequence.num_tokens
    table = sequence.block_table
    return ScheduledSequence(
        token_ids=sequence.token_ids[start:end],
        num_computed_tokens=start,
        block_table=table if complete else table[: -(-end // sequence.block_size)],
        wants_logits=complete,
    )


def _sample_row(sequence: EngineSequence) -> SampleRow:
    return SampleRow(sequence.request.sampling, sequence.num_output_tokens, sequence.output_counts)


def _finish_reason(sequence: EngineSequence) -> FinishReason | None:
    num_output_tokens = sequence.num_output_tokens
    if num_output_tokens and sequence.token_ids[-1] in sequence.request.stop_token_ids:
        return FinishReason.STOP
    if num_output_tokens >= sequence.request.max_tokens:
        return FinishReason.LENGTH
    return None


def _num_prefill_tokens(batch: list[Chunk]) -> int:
    return sum(num_tokens for _, num_tokens in batch if num_tokens > 1)


def _num_decoding(batch: list[Chunk]) -> int:
    return sum(1 for _, num_tokens in batch if num_tokens == 1)


def _is_out_of_memory(error: Exception) -> bool:
    # torch raises a plain RuntimeError when the allocator of the CPU fails.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
