"""The router's spans of requests: one for each, with its placements as events."""

from __future__ import annotations

import time
from typing import Any, Final

from kvloom.errors import reason_name
from kvloom.v1.generation_pb2 import FINISH_REASON_CONTENT_FILTER
from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from kvloom_common.tracing import attributes as names
from kvloom_common.tracing.spans import Span, SpanEvent, Value
from kvloom_common.tracing.trace_context import TraceContext, parse_traceparent, router_span
from kvloom_common.tracing.tracer import Tracer
from router.core.actions import PlacementDecided, RequestEnded
from router.observer import RouterObserver

MAX_REMEMBERED: Final = 16_384
"""Requests whose placements are kept until they end. Of the oldest beyond that, the span has no placements."""


class TracingObserver(RouterObserver):
    """Writes the spans beside what every router observes."""

    def __init__(self, tracer: Tracer, *parts: Any) -> None:
        """`parts` are RouterObserver's arguments."""
        super().__init__(*parts)
        self._tracer = tracer
        self._placements: dict[tuple[str, str], list[PlacementDecided]] = {}
        """By the client's and the request's id, the oldest first."""

    def placement_decided(self, decision: PlacementDecided) -> None:
        super().placement_decided(decision)
        if decision.request.traceparent:
            request = decision.request
            self._placements.setdefault((request.client_id, request.request_id), []).append(decision)
            if len(self._placements) > MAX_REMEMBERED:
                del self._placements[next(iter(self._placements))]

    def request_ended(self, ended: RequestEnded) -> None:
        super().request_ended(ended)
        placements = self._placements.pop((ended.client_id, ended.request_id), [])
        parent = parse_traceparent(ended.traceparent) if ended.traceparent else None
        if parent is not None:
            self._tracer.write(span_of(ended, placements, parent, time.time()))


def span_of(ended: RequestEnded, placements: list[PlacementDecided], parent: TraceContext, now: float) -> Span:
    """Return the span of a request that ended `now`, in seconds since 1970. `parent` is the span of its edge or SDK."""
    began_at = now - ended.e2e_latency_seconds
    reason = FINISH_REASON_NAMES[ended.reason]
    moves = ended.moves
    is_filtered = ended.reason == FINISH_REASON_CONTENT_FILTER
    error = reason_name(ended.error_reason).lower() if ended.error_reason else ""
    attributes: dict[str, Value] = {
        names.PROVIDER: names.PROVIDER_KVLOOM,
        names.REQUEST_MODEL: ended.model,
        names.RESPONSE_ID: ended.request_id,
        names.FINISH_REASONS: [reason],
        names.INPUT_TOKENS: ended.num_prompt_tokens,
        names.OUTPUT_TOKENS: ended.num_output_tokens,
        names.CACHED_TOKENS: ended.num_cached_tokens,
        names.CLASS: ended.priority_class.name,
        names.ATTEMPTS: ended.num_attempts,
        names.QUEUE_TIME: ended.queue_time_seconds,
    }
    known = {
        names.REQUEST_ID: ended.client_request_id,
        names.TENANT: ended.tenant,
        names.SHARD: ended.shard_id,
        names.ERROR_TYPE: error,
    }
    attributes |= {name: value for name, value in known.items() if value}
    if ended.ttft_seconds is not None:
        attributes[names.TTFT] = ended.ttft_seconds
    events: list[SpanEvent] = []
    if placements:
        request = placements[0].request
        if request.session_key:
            attributes[names.SESSION] = attributes[names.CONVERSATION] = request.session_key
        if request.safety_identifier:
            attributes[names.USER] = request.safety_identifier
        first_at = placements[0].decided_at
        dispatched_at = began_at + ended.queue_time_seconds
        events += [_placed(one, dispatched_at + one.decided_at - first_at) for one in placements]
    counts = {"preempted": moves.num_preemptions, "migrated": moves.num_migrations, "failed_over": moves.num_failovers}
    events += [SpanEvent(name, now, {"count": count}) for name, count in counts.items() if count]
    if is_filtered:
        events.append(SpanEvent("guardrail", now, {names.ERROR_TYPE: error or reason}))
    return Span(
        f"route {ended.model}",
        router_span(parent, ended.request_id),
        parent.span_id,
        began_at,
        now,
        attributes,
        sorted(events, key=lambda event: event.at),
        error=error,
        ttft_seconds=ended.ttft_seconds,
        is_notable=is_filtered or any(counts.values()),
    )


def _placed(decision: PlacementDecided, at: float) -> SpanEvent:
    """The event of a placement, with the terms of its cost in seconds."""
    plan = decision.plan
    attributes: dict[str, Value] = {
        names.SHARD: plan.picked_shard_id,
        "kvloom.attempt": decision.attempt_id,
        "kvloom.candidates": len(plan.shards),
    }
    for shard in plan.shards:
        if shard.shard_id == plan.picked_shard_id:
            attributes["kvloom.overlap_tokens"] = shard.num_overlap_tokens
            if shard.predicted_ttft_seconds is not None:
                attributes["kvloom.predicted_ttft_seconds"] = shard.predicted_ttft_seconds
            attributes |= {f"kvloom.cost.{term}_seconds": seconds for term, seconds in shard.cost_terms.items()}
    return SpanEvent("placed", at, attributes)
