"""One engine iteration: schedule → run → postprocess. Synchronous; `engine.py` gives it a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import torch

from kvloom_common.config import SpeculationConfig
from shard_server.engines.base import (
    AdapterError,
    EngineLoad,
    EngineRequest,
    PoolingKind,
    SequenceEnd,
    SequenceFinishReason,
    SequenceStart,
    StepOutput,
    TokenLogprobs,
)
from shard_server.engines.torch_engine.drafter import Drafter, Drafts
from shard_server.engines.torch_engine.memory import is_out_of_memory
from shard_server.engines.torch_engine.model_runner import ScheduledSequence
from shard_server.engines.torch_engine.pooling import PooledPrompt
from shard_server.engines.torch_engine.sampling.batched_draws import PlainRow
from shard_server.engines.torch_engine.sampling.guides import GuideError, GuideState
from shard_server.engines.torch_engine.sampling.sampler import Draws, SampleRow, draw_in_all_ways
from shard_server.engines.torch_engine.scheduler import MIN_PREFILL_TOKENS_PER_STEP, Chunk, Scheduler
from shard_server.engines.torch_engine.sequence import Sequence as EngineSequence
from shard_server.engines.torch_engine.speed import StepSpeed

_MAX_WARM_UPS = 6
_WARM_UP_SECONDS = 0.25
"""A warm-up takes no more tokens than this: on a slow CPU those of a step would take a second."""
_WARM_SHARE = 1.5
"""A step with at most this many times the tokens of the previous one counts as warm."""


class Runner(Protocol):
    """Computes logits; see ModelRunner."""

    def run(self, batch: Sequence[ScheduledSequence]) -> torch.Tensor: ...

    def hidden_states(self) -> list[torch.Tensor]: ...


class _Preparing(NamedTuple):
    """A sequence that waits for other threads."""

    request: EngineRequest
    submit_time: float
    guide: Future[GuideState] | None
    adapter: Future[Any] | None

    @property
    def is_done(self) -> bool:
        return all(part is None or part.done() for part in (self.guide, self.adapter))


class StepLoop:
    """The live sequences, and the steps that compute their tokens."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        speculation: SpeculationConfig | None = None,
        default_pooling: PoolingKind = PoolingKind.MEAN,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`default_pooling` is that of requests for embeddings that do not say how."""
        self.scheduler = scheduler
        self._drafter = Drafter(scheduler, speculation or SpeculationConfig())
        self._runner = runner
        self._default_pooling = default_pooling
        self._clock = clock
        self._sequences: dict[str, EngineSequence] = {}
        self._preparing: dict[str, _Preparing] = {}
        """By request id: sequences whose guides are being compiled, or whose adapters are being loaded, in other
        threads."""
        self._num_submitted = 0
        self._output = StepOutput()
        self._speed = StepSpeed()

    def warm_up(self, num_max_tokens: int) -> StepSpeed:
        """Prefill tokens as a step will, at most `num_max_tokens`, decode one, and draw behind a cached prefix.

        Otherwise the first request would pay for first touches of memory. Routers also need speeds to plan with.
        """
        num_warm_tokens = 0
        num_tokens = min(MIN_PREFILL_TOKENS_PER_STEP, num_max_tokens)
        for _ in range(_MAX_WARM_UPS):
            self._measure_speed(num_tokens)
            if num_tokens <= _WARM_SHARE * num_warm_tokens:
                break
            num_warm_tokens = num_tokens
            tokens_per_second = self._speed.prefill_tokens_per_second
            budget = min(self.scheduler.prefill_budget(tokens_per_second), int(tokens_per_second * _WARM_UP_SECONDS))
            num_tokens = min(max(num_tokens, budget), num_max_tokens)
        # What a device loads at the first use of an operation, no request shall wait for: behind a cached prefix, too.
        num_cached = self.scheduler.pool.block_size
        num_new = min(num_cached, num_max_tokens - num_cached)
        if num_new > 0:
            cached = ScheduledSequence([0] * num_new, num_cached, range(2), wants_logits=True)
            draw_in_all_ways(self._runner.run([cached]))
        return self._speed

    def add(
        self,
        request: EngineRequest,
        submit_time: float,
        guide: Future[GuideState] | None = None,
        adapter: Future[Any] | None = None,
    ) -> None:
        """Add a sequence; `submit_time` is in the clock's time. It is not scheduled until its guide is compiled and its
        adapter loaded."""
        self._num_submitted += 1
        if guide is not None or adapter is not None:
            self._preparing[request.request_id] = _Preparing(request, submit_time, guide, adapter)
        else:
            self._add(request, submit_time)

    def cancel(self, request_id: str) -> None:
        """End a sequence as CANCELLED in the next output; unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, SequenceFinishReason.CANCELLED)
        elif request_id in self._preparing:
            guide = self._preparing.pop(request_id).guide
            if guide is not None:
                guide.cancel()
            self._output.ends.append(SequenceEnd(request_id, SequenceFinishReason.CANCELLED))

    @property
    def has_work(self) -> bool:
        """True while `step` has something to compute or to report."""
        prepared = any(preparing.is_done for preparing in self._preparing.values())
        return self.scheduler.has_work or bool(self._output.ends) or prepared

    def step(self) -> StepOutput | None:
        """Schedule, run, postprocess. Returns None when the step has no output (part of a prompt)."""
        begin = self._clock()
        if self._preparing:
            self._take_prepared()
        batch = self.scheduler.schedule(self._speed.prefill_tokens_per_second)
        if batch:
            drafts = self._drafter.draft(batch)
            draws = self._run(batch, drafts, begin)
            if draws is not None:
                self._postprocess(batch, drafts, draws)
                self._speed.add(_num_prefill_tokens(batch), self._clock() - begin, num_decoding=_num_decoding(batch))
            self._drafter.release_blocks(drafts)
        return self._take_output()

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and sequences account for one another."""
        self.scheduler.check_integrity()

    def _measure_speed(self, num_tokens: int) -> None:
        """Measure prefill and decode speed once; earlier measurements are dropped."""
        self._speed = StepSpeed()
        self._speed.add(num_tokens, self._measure_step(0, num_tokens), num_decoding=0)
        self._speed.add(0, self._measure_step(num_tokens, 1), num_decoding=1)

    def _measure_step(self, num_past: int, num_new: int) -> float:
        """Seconds that a step of `num_new` tokens takes after `num_past` others."""
        block_table = range(-(-(num_past + num_new) // self.scheduler.pool.block_size))
        begin = self._clock()
        self._runner.run([ScheduledSequence([0] * num_new, num_past, block_table, wants_logits=True)])
        return self._clock() - begin

    def _add(
        self, request: EngineRequest, submit_time: float, guide: GuideState | None = None, adapter: Any = None
    ) -> None:
        pooled = None if request.pooling is None else PooledPrompt(request, self._default_pooling)
        pool = self.scheduler.pool
        owner = pool.order.owner_of(request.kv_share, submit_time)
        sequence = EngineSequence(request, pool.block_size, owner, submit_time, guide, pooled, adapter)
        self._sequences[sequence.request.request_id] = sequence
        self.scheduler.add(sequence)
        if sequence.pooled is None and (reason := _finish_reason(sequence)) is not None:
            self._end(sequence, reason)  # resumed with nothing left to generate

    def _take_prepared(self) -> None:
        for request_id, (request, submit_time, guide, adapter) in list(self._preparing.items()):
            if not self._preparing[request_id].is_done:
                continue
            del self._preparing[request_id]
            try:
                state = None if guide is None else guide.result()
                weights = None if adapter is None else adapter.result()
            except GuideError as error:
                self._output.ends.append(_guide_rejected(request_id, error))
            except AdapterError as error:
                self._output.ends.append(SequenceEnd(request_id, SequenceFinishReason.ERROR, str(error)))
            else:
                self._add(request, submit_time, state, weights)

    def _run(self, batch: list[Chunk], drafts: Drafts, begin: float) -> Draws | None:
        """Compute the batch; returns logits to draw from, for the sequences whose known tokens are all computed now.

        Returns None when memory did not suffice.
        """
        scheduled: list[ScheduledSequence] = []
        for sequence, num_tokens in batch:
            if sequence.queue_time_seconds is None:
                sequence.queue_time_seconds = begin - sequence.submit_time
                sequence.num_reused_tokens = sequence.num_computed_tokens
            scheduled.append(_scheduled(sequence, num_tokens, drafts.get(sequence, ())))
        try:
            logits = self._runner.run(scheduled)
            draws = Draws(logits, _drawn_rows(scheduled) if any(one.num_prompt_logits for one in scheduled) else None)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # Nothing counts as computed yet, so the step can simply be retried without the newest sequence.
            self._end(batch[-1][0], SequenceFinishReason.ERROR, f"out of memory: {error}")
            return None
        if draws.wants_rows_together:
            draws.draw_together(_plain_rows(batch, drafts))
        return draws

    def _postprocess(self, batch: list[Chunk], drafts: Drafts, draws: Draws) -> None:
        row = 0
        if any(sequence.pooled is not None for sequence, _ in batch):
            self._pool(batch)
        for sequence, num_tokens in batch:
            if sequence.pooled is not None:
                continue
            num_logits = sequence.num_prompt_logits(num_tokens)
            if num_logits:
                _collect_prompt_logprobs(sequence, num_tokens, num_logits, draws, row)
                # The first output token is drawn from the last row of a complete prompt.
                row += num_logits - (num_tokens == sequence.num_uncomputed_tokens)
            self.scheduler.mark_computed(sequence, num_tokens)
            if not sequence.num_uncomputed_tokens:
                draft = drafts.get(sequence, ())
                self._draw(sequence, draws, row, draft)
                row += 1 + len(draft)

    def _pool(self, batch: list[Chunk]) -> None:
        """Add the hidden states of this step's tokens to the embeddings that they are wanted for."""
        states = iter(self._runner.hidden_states())
        for sequence, num_tokens in batch:
            pooled = sequence.pooled
            if pooled is None:
                continue
            pooled.add(next(states), sequence.num_computed_tokens)
            self.scheduler.mark_computed(sequence, num_tokens)
            if not sequence.num_uncomputed_tokens:
                self._end_pooled(sequence, pooled.vector())

    def _end_pooled(self, sequence: EngineSequence, vector: bytes | None) -> None:
        if vector is None:
            self._end(sequence, SequenceFinishReason.ERROR, "the model's hidden states are not finite")
            return
        self._output.starts.append(self._start(sequence))
        self._end(sequence, SequenceFinishReason.STOP, embedding=vector)

    def _draw(self, sequence: EngineSequence, draws: Draws, row: int, draft: Sequence[int]) -> None:
        """Draw tokens from `row` on, while they equal the drafts that the following rows were computed for."""
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        end = None
        for index in range(len(draft) + 1):
            if index:  # the KV of a correct draft is that of the sequence
                self.scheduler.mark_computed(sequence, 1)
            end = _draw_token(sequence, draws, row + index, token_ids, logprobs)
            if end is not None or index == len(draft) or token_ids[-1] != draft[index]:
                break
        if draft:
            self._drafter.on_verified(sequence, draft, token_ids)
        if token_ids:
            self._emit(sequence, token_ids, logprobs)
        if end is not None:
            self._end(sequence, end.reason, end.error, refusal=end.refusal)

    def _emit(self, sequence: EngineSequence, token_ids: list[int], logprobs: list[TokenLogprobs]) -> None:
        request_id = sequence.request.request_id
        output = self._output
        output.request_ids.append(request_id)
        output.token_ids.append(token_ids)
        if logprobs:
            output.logprobs[request_id] = logprobs
        if not sequence.started:
            output.starts.append(self._start(sequence))

    def _start(self, sequence: EngineSequence) -> SequenceStart:
        sequence.started = True
        return SequenceStart(
            sequence.request.request_id,
            sequence.num_reused_tokens,
            sequence.queue_time_seconds or 0.0,
            sequence.prompt_logprobs or (),
        )

    def _end(
        self,
        sequence: EngineSequence,
        reason: SequenceFinishReason,
        error: str = "",
        *,
        refusal: str = "",
        embedding: bytes = b"",
    ) -> None:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.request.request_id]
        self._output.ends.append(SequenceEnd(sequence.request.request_id, reason, error, refusal, embedding))

    def _take_output(self) -> StepOutput | None:
        output = self._output
        output.kv_events = self.scheduler.pool.take_events()
        if not (output.request_ids or output.ends or output.kv_events):
            return None
        output.predictions = self._drafter.take_predictions()
        output.load = self._load()
        self._output = StepOutput()
        return output

    def _load(self) -> EngineLoad:
        scheduler = self.scheduler
        shares = scheduler.load_shares()
        for preparing in self._preparing.values():
            share = shares[preparing.request.origin]
            share.num_waiting += 1
            share.num_queued_prefill_tokens += preparing.request.num_expected_prefill_tokens
        return EngineLoad.of(
            shares,
            num_submitted=self._num_submitted,
            num_available_blocks=scheduler.pool.num_available_to_any,
            kv_shares=scheduler.pool.order.usage(),
            num_preemptions=scheduler.num_preemptions,
            prefill_tokens_per_second=self._speed.prefill_tokens_per_second,
            decode_step_seconds=self._speed.decode_step_seconds,
            num_draft_tokens=self._drafter.num_draft_tokens,
            num_accepted_tokens=self._drafter.num_accepted_tokens,
        )


def _scheduled(sequence: EngineSequence, num_tokens: int, draft: Sequence[int]) -> ScheduledSequence:
    start = sequence.num_computed_tokens
    end = start + num_tokens
    complete = end == sequence.num_tokens
    is_pooled = sequence.pooled is not None
    table = sequence.block_table
    token_ids = sequence.token_ids[start:end]
    return ScheduledSequence(
        token_ids=[*token_ids, *draft] if draft else token_ids,
        num_computed_tokens=start,
        block_table=table if complete else table[: -(-end // sequence.block_size)],
        wants_logits=complete and not is_pooled,
        num_drafts=len(draft),
        num_prompt_logits=sequence.num_prompt_logits(num_tokens),
        wants_hidden_states=is_pooled,
        adapter=sequence.adapter,
    )


def _collect_prompt_logprobs(
    sequence: EngineSequence, num_tokens: int, num_logits: int, draws: Draws, first_row: int
) -> None:
    """Add the logprobs of the prompt tokens that follow the last `num_logits` of the next `num_tokens` tokens, whose
    logits begin at row `first_row`."""
    known, num_top = sequence.prompt_logprobs, sequence.request.sampling.num_prompt_logprobs
    assert known is not None
    assert num_top is not None
    end = sequence.num_computed_tokens + num_tokens
    first = end - num_logits
    for position in range(first, min(end, len(sequence.request.prompt_token_ids) - 1)):
        known.append(draws.logprobs(first_row + position - first, sequence.token_ids[position + 1], num_top))


def _drawn_rows(batch: Sequence[ScheduledSequence]) -> list[int]:
    """The logit rows of a step that tokens are drawn from."""
    rows: list[int] = []
    num_rows = 0
    for sequence in batch:
        num_rows += sequence.num_logits
        if sequence.wants_logits:
            rows += range(num_rows - 1 - sequence.num_drafts, num_rows)
    return rows


def _plain_rows(batch: list[Chunk], drafts: Drafts) -> list[PlainRow]:
    """The logit rows of a step whose tokens depend on no other token that is drawn in it."""
    rows: list[PlainRow] = []
    first_row = 0
    for sequence, num_tokens in batch:
        is_complete = sequence.num_uncomputed_tokens == num_tokens
        if num_logits := sequence.num_prompt_logits(num_tokens):
            first_row += num_logits - is_complete
        if not is_complete or sequence.pooled is not None:  # part of a prompt, or a whole one without an answer
            continue
        num_rows = 1 + len(drafts.get(sequence, ()))
        sampling = sequence.request.sampling
        if sampling.temperature > 0 and sequence.guide is None and sequence.adjustments is None:
            num_output_tokens = sequence.num_output_tokens
            rows += [PlainRow(first_row + i, sampling, num_output_tokens + i) for i in range(num_rows)]
        first_row += num_rows
    return rows


def _draw_token(
    sequence: EngineSequence, draws: Draws, row: int, token_ids: list[int], logprobs: list[TokenLogprobs]
) -> SequenceEnd | None:
    """Draw the sequence's next token and append it to the lists; returns the sequence's end if it ends."""
    request, guide = sequence.request, sequence.guide
    try:
        mask = guide.mask() if guide is not None else None
    except GuideError as error:
        return SequenceEnd(request.request_id, SequenceFinishReason.ERROR, "its guide cannot be followed", str(error))
    sample_row = SampleRow(request.sampling, sequence.num_output_tokens, sequence.adjustments, mask)
    token_id, token_logprobs = draws.draw(row, sample_row)
    if token_id is None:
        return SequenceEnd(request.request_id, SequenceFinishReason.ERROR, "the model's logits are not finite")
    sequence.append(token_id)
    token_ids.append(token_id)
    if token_logprobs is not None:
        logprobs.append(token_logprobs)
    reason = _finish_reason(sequence)
    if reason is None and guide is not None:
        guide.take((token_id,))
        if guide.is_complete:
            reason = SequenceFinishReason.STOP
    return None if reason is None else SequenceEnd(request.request_id, reason)


def _guide_rejected(request_id: str, error: GuideError) -> SequenceEnd:
    return SequenceEnd(request_id, SequenceFinishReason.ERROR, "its guide cannot be compiled", refusal=str(error))


def _finish_reason(sequence: EngineSequence) -> SequenceFinishReason | None:
    num_output_tokens = sequence.num_output_tokens
    if num_output_tokens and sequence.token_ids[-1] in sequence.request.stop_token_ids:
        return SequenceFinishReason.STOP
    if num_output_tokens >= sequence.request.max_tokens:
        return SequenceFinishReason.LENGTH
    return None


def _num_prefill_tokens(batch: list[Chunk]) -> int:
    return sum(num_tokens for _, num_tokens in batch if num_tokens > 1)


def _num_decoding(batch: list[Chunk]) -> int:
    return sum(1 for _, num_tokens in batch if num_tokens == 1)
