"""One engine iteration: schedule → run → postprocess. Synchronous; `engine.py` gives it a thread.

A runner on a device returns before its step is computed. The tokens are then drawn on the device
as well, and an iteration is: give it step N + 1, whose sequences continue with tokens of step N that only the device
knows; wait for these tokens and report them; draw those of step N + 1, since masks and penalties are known by now. So
the device computes one step while the CPU does everything else for its neighbours. A sequence that turns out to have
ended in step N (a stop token, a guide, a client that left) has a void row in step N + 1: its KV goes to blocks that are
lent again in step N + 2 at the earliest, which the device computes afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

from kvloom_common.config import SpeculationConfig
from shard_server.engines.base import (
    AdapterError,
    EngineLoad,
    EngineRequest,
    PoolingKind,
    Sampling,
    SequenceEnd,
    SequenceFinishReason,
    SequenceStart,
    StepOutput,
    TokenLogprobs,
)
from shard_server.engines.torch_engine.drafter import Drafter
from shard_server.engines.torch_engine.launched_step import (
    LaunchedStep,
    collect_prompt_logprobs,
    draw_token,
    drawn_rows,
    finish_reason,
    guide_failed,
    not_finite,
    plain_rows,
    sample_row,
    scheduled_part,
    take_token,
)
from shard_server.engines.torch_engine.memory import is_out_of_memory
from shard_server.engines.torch_engine.model_runner import Runner, ScheduledSequence
from shard_server.engines.torch_engine.pooling import PooledPrompt
from shard_server.engines.torch_engine.sampling.device_draws import DeviceDraws
from shard_server.engines.torch_engine.sampling.guides import GuideError, GuideState
from shard_server.engines.torch_engine.sampling.sampler import Draws, SampleRow
from shard_server.engines.torch_engine.scheduler import Chunk, Scheduler
from shard_server.engines.torch_engine.sequence import Sequence as EngineSequence
from shard_server.engines.torch_engine.speed import StepSpeed
from shard_server.engines.torch_engine.warm_up import warm_up

_VOID_ROW: Final = SampleRow(Sampling(temperature=0.0), 0)
"""How tokens are drawn that nobody reads."""


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
        overlaps: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`default_pooling` is that of requests for embeddings that do not say how. Without `overlaps` a step is over
        before the next one begins, on devices as well."""
        self.scheduler = scheduler
        self._drafter = Drafter(scheduler, speculation or SpeculationConfig())
        self._runner = runner
        self._drawn_tokens = runner.drawn_tokens if overlaps else None
        self._in_flight: LaunchedStep | None = None
        """The step that the device computes, and whose tokens are not known here."""
        self._read_at = 0.0
        """When tokens that were drawn on the device were last known here."""
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
        """Run and draw as requests will, with at most `num_max_tokens` tokens; see warm_up.py."""
        self._speed = warm_up(self._runner, self.scheduler, num_max_tokens, self._drawn_tokens, self._clock)
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
        return self.scheduler.has_work or self._in_flight is not None or bool(self._output.ends) or prepared

    def step(self) -> StepOutput | None:
        """Schedule, run, postprocess. Returns None when the step has no output (part of a prompt)."""
        begin = self._clock()
        if self._preparing:
            self._take_prepared()
        previous, self._in_flight = self._in_flight, None
        if previous is not None and previous.draws is None:
            self._finish(previous)
            return self._take_output()
        batch = self.scheduler.schedule(self._speed.prefill_tokens_per_second, is_ahead=previous is not None)
        launched = self._launch(batch, begin) if batch else None
        if previous is not None:
            self._take_drawn(previous)
        if launched is not None:
            if self._can_draw_on_device(launched):
                self._draw_on_device(launched)
            elif previous is not None:  # it is computed while the output of the previous one is read
                self._in_flight = launched
            else:
                self._finish(launched)
        return self._take_output()

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and sequences account for one another."""
        self.scheduler.check_integrity()

    def _add(
        self, request: EngineRequest, submit_time: float, guide: GuideState | None = None, adapter: Any = None
    ) -> None:
        pooled = None if request.pooling is None else PooledPrompt(request, self._default_pooling)
        pool = self.scheduler.pool
        owner = pool.order.owner_of(request.kv_share, submit_time)
        sequence = EngineSequence(request, pool.block_size, owner, submit_time, guide, pooled, adapter)
        self._sequences[sequence.request.request_id] = sequence
        self.scheduler.add(sequence)
        if sequence.pooled is None and (reason := finish_reason(sequence)) is not None:
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

    def _launch(self, batch: list[Chunk], begin: float) -> LaunchedStep | None:
        """Give the runner a step; returns None when memory did not suffice."""
        drafts = self._drafter.draft(batch)
        scheduled: list[ScheduledSequence] = []
        for sequence, num_tokens in batch:
            if sequence.queue_time_seconds is None:
                sequence.queue_time_seconds = begin - sequence.submit_time
                sequence.num_reused_tokens = sequence.num_computed_tokens
            scheduled.append(scheduled_part(sequence, num_tokens, drafts.get(sequence, ())))
        try:
            logits = self._runner.run(scheduled)
        except (MemoryError, RuntimeError) as error:
            self._on_failed_step(batch, error)
            self._drafter.release_blocks(drafts)
            return None
        return LaunchedStep(batch, scheduled, drafts, begin, logits)

    def _on_failed_step(self, batch: list[Chunk], error: Exception) -> None:
        """End the newest sequence if memory did not suffice. Nothing counts as computed yet, so the step can simply be
        retried without it. Raises other errors again."""
        if not is_out_of_memory(error):
            raise error
        newest = batch[-1][0]
        if newest.is_running:
            self._end(newest, SequenceFinishReason.ERROR, f"out of memory: {error}")

    def _finish(self, step: LaunchedStep) -> None:
        """Draw the tokens of a step here, one sequence after the other."""
        is_partial = any(one.num_prompt_logits for one in step.scheduled)
        try:
            draws = Draws(step.logits, drawn_rows(step.scheduled) if is_partial else None)
        except (MemoryError, RuntimeError) as error:
            self._on_failed_step(step.batch, error)
        else:
            if draws.wants_rows_together:
                draws.draw_together(plain_rows(step))
            self._postprocess(step, draws)
            seconds = self._clock() - max(step.begin, self._read_at)
            self._speed.add(_num_prefill_tokens(step.batch), seconds, num_decoding=_num_decoding(step.batch))
        self._drafter.release_blocks(step.drafts)

    def _postprocess(self, step: LaunchedStep, draws: Draws) -> None:
        if any(part.wants_hidden_states for part in step.scheduled):
            self._pool(step)
        for sequence, num_tokens, row in step.live_rows():
            if sequence.pooled is not None:
                continue
            num_logits = sequence.num_prompt_logits(num_tokens)
            if num_logits:
                collect_prompt_logprobs(sequence, num_tokens, num_logits, draws, row)
                # The first output token is drawn from the last row of a complete prompt.
                row += num_logits - 1
            self.scheduler.mark_computed(sequence, num_tokens)
            if not sequence.num_uncomputed_tokens:
                self._draw(sequence, draws, row, step.drafts.get(sequence, ()))

    def _can_draw_on_device(self, step: LaunchedStep) -> bool:
        """False where the next step could not be planned without this one's tokens: drafts follow from them."""
        drawn_tokens = self._drawn_tokens
        if drawn_tokens is None or self._drafter.can_draft(step.batch):
            return False
        return step.can_draw_on_device and len(step.logits) <= len(drawn_tokens)

    def _draw_on_device(self, step: LaunchedStep) -> None:
        """Let the device draw the tokens of a step, and keep it in flight."""
        assert self._drawn_tokens is not None, "checked"
        rows = [self._sample_row(sequence) for sequence in step.drawing]
        try:
            step.draws = DeviceDraws(step.logits, rows, self._drawn_tokens)
        except (MemoryError, RuntimeError) as error:
            self._on_failed_step(step.batch, error)
            return
        for sequence, num_tokens, row in step.live_rows():
            self.scheduler.mark_computed(sequence, num_tokens)
            if not sequence.num_uncomputed_tokens and sequence.num_output_tokens + 1 < sequence.request.max_tokens:
                sequence.drawn_row = row
        self._in_flight = step

    def _sample_row(self, sequence: EngineSequence) -> SampleRow:
        if sequence.is_running:
            try:
                return sample_row(sequence)
            except GuideError as error:
                self._end_as(sequence, guide_failed(sequence, error))
        return _VOID_ROW

    def _take_drawn(self, step: LaunchedStep) -> None:
        """Wait for the tokens of a step that were drawn on the device, and report them."""
        assert step.draws is not None, "it was drawn on the device"
        for sequence, (token_id, logprobs) in zip(step.drawing, step.draws.read(), strict=True):
            if not sequence.is_running:
                continue
            sequence.drawn_row = None
            if token_id is None:
                self._end_as(sequence, not_finite(sequence))
                continue
            end = take_token(sequence, token_id)
            self._emit(sequence, [token_id], [] if logprobs is None else [logprobs])
            if end is not None:
                self._end_as(sequence, end)
        now = self._clock()
        seconds, self._read_at = now - max(step.begin, self._read_at), now
        self._speed.add(_num_prefill_tokens(step.batch), seconds, num_decoding=_num_decoding(step.batch))

    def _pool(self, step: LaunchedStep) -> None:
        """Add the hidden states of this step's tokens to the embeddings that they are wanted for."""
        states = iter(self._runner.hidden_states())
        for sequence, num_tokens in step.batch:
            pooled = sequence.pooled
            if pooled is None:
                continue
            own = next(states)
            if not sequence.is_running:
                continue
            pooled.add(own, sequence.num_computed_tokens)
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
            end = draw_token(sequence, draws, row + index, token_ids, logprobs)
            if end is not None or index == len(draft) or token_ids[-1] != draft[index]:
                break
        if draft:
            self._drafter.on_verified(sequence, draft, token_ids)
        if token_ids:
            self._emit(sequence, token_ids, logprobs)
        if end is not None:
            self._end_as(sequence, end)

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

    def _end_as(self, sequence: EngineSequence, end: SequenceEnd) -> None:
        self._end(sequence, end.reason, end.error, refusal=end.refusal)

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


def _guide_rejected(request_id: str, error: GuideError) -> SequenceEnd:
    return SequenceEnd(request_id, SequenceFinishReason.ERROR, "its guide cannot be compiled", refusal=str(error))


def _num_prefill_tokens(batch: list[Chunk]) -> int:
    return sum(num_tokens for _, num_tokens in batch if num_tokens > 1)


def _num_decoding(batch: list[Chunk]) -> int:
    return sum(1 for _, num_tokens in batch if num_tokens == 1)
