"""A shard's spans of sequences: how long each waited, prefilled and decoded, and with which others it shared the step
that gave its first token."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, SequenceFinish
from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from kvloom_common.tracing import attributes as names
from kvloom_common.tracing.spans import Span, Value
from kvloom_common.tracing.trace_context import TraceContext, parse_traceparent, router_span
from kvloom_common.tracing.tracer import Tracer
from shard_server.engines.base import SequenceStart
from shard_server.live_sequences import LiveSequence


class _Started(NamedTuple):
    prefill_at: float
    first_token_at: float


class SequenceTracer:
    """Writes the spans. Times of the shard's clock are turned into those since 1970 when they are written."""

    def __init__(
        self,
        tracer: Tracer,
        shard_id: str,
        model: str,
        clock: Callable[[], float],
        now: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is that of the calls below; `now` has seconds since 1970."""
        self._tracer = tracer
        self._shard_id = shard_id
        self._model = model
        self._clock = clock
        self._now = now
        self._started: dict[str, _Started] = {}
        """By the engine's request id."""
        self._step_at = 0.0
        self._step_began_at = 0.0
        self._step: list[TraceContext] = []
        """The sampled sequences that have their first token from the step at `_step_at`."""

    def sequence_started(self, sequence: LiveSequence, start: SequenceStart, now: float) -> None:
        """The engine has given the first token of a sequence, in a step that ended `now`."""
        if "traceparent" not in sequence.names:
            return
        prefill_at = min(now, sequence.received_at + start.queue_time_seconds)
        self._started[sequence.request.request_id] = _Started(prefill_at, now)
        if now != self._step_at:
            self._write_step()
            self._step_at, self._step_began_at = now, prefill_at
        context = _context_of(sequence)
        if context is not None and context[0].is_sampled:
            self._step.append(context[0])
            self._step_began_at = min(self._step_began_at, prefill_at)

    def sequence_ended(self, sequence: LiveSequence, finish: SequenceFinish, now: float) -> None:
        """A sequence has ended `now`."""
        self._write_step()
        started = self._started.pop(sequence.request.request_id, None)
        contexts = _context_of(sequence)
        if contexts is None:
            return
        context, parent_id = contexts
        epoch = self._now() - self._clock()
        received_at = epoch + sequence.received_at
        attributes: dict[str, Value] = {
            names.SHARD: self._shard_id,
            names.REQUEST_MODEL: self._model,
            names.INPUT_TOKENS: finish.num_prompt_tokens,
            names.OUTPUT_TOKENS: finish.num_output_tokens,
            names.CACHED_TOKENS: finish.num_cached_tokens,
            names.FINISH_REASONS: [FINISH_REASON_NAMES[finish.reason]],
        }
        phases: list[tuple[str, float, float]] = []
        ttft_seconds: float | None = None
        if started is not None:
            ttft_seconds = attributes[names.TTFT] = started.first_token_at - sequence.received_at
            attributes[names.QUEUE_TIME] = started.prefill_at - sequence.received_at
            phases = [
                ("queue", sequence.received_at, started.prefill_at),
                ("prefill", started.prefill_at, started.first_token_at),
                ("decode", started.first_token_at, now),
            ]
        is_failed = finish.reason == FINISH_REASON_ERROR
        self._tracer.write(
            Span(
                f"sequence {self._model}",
                context,
                parent_id,
                received_at,
                epoch + now,
                attributes,
                error="engine_failed" if is_failed else "",
                ttft_seconds=ttft_seconds,
            ),
            *(
                Span(name, context.child(name), context.span_id, epoch + began_at, epoch + ended_at)
                for name, began_at, ended_at in phases
            ),
        )

    def _write_step(self) -> None:
        """Write the span of the step that gave several sequences their first tokens, with links to them."""
        if not self._step:
            return
        first, epoch = self._step[0], self._now() - self._clock()
        self._tracer.write(
            Span(
                "engine step",
                first.child("step"),
                first.span_id,
                epoch + self._step_began_at,
                epoch + self._step_at,
                {names.SHARD: self._shard_id, names.BATCH_SIZE: len(self._step)},
                links=tuple(self._step),
            )
        )
        self._step = []


def _context_of(sequence: LiveSequence) -> tuple[TraceContext, int] | None:
    """The span of a sequence and its parent's id: the router's, whose id follows from what the shard was told."""
    edge = parse_traceparent(sequence.names.get("traceparent", ""))
    if edge is None:
        return None
    router = router_span(edge, sequence.names.get("request_id", ""))
    return router.child(f"sequence {sequence.request.request_id}"), router.span_id
