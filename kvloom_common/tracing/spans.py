"""Spans: each says what one process did for a request. A rule decides which are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from kvloom_common.tracing.trace_context import TraceContext

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]
Kind = Literal["server", "internal"]


class SpanEvent(msgspec.Struct, frozen=True):
    """Something that happened at one time within a span."""

    name: str
    at: float
    """Seconds since 1970."""
    attributes: Attributes = {}


class Span(msgspec.Struct, frozen=True):
    """The part that one process had in a request, once it has ended."""

    name: str
    context: TraceContext
    parent_id: int
    """The span id of its parent in the same trace. 0: it has none."""
    began_at: float
    """Seconds since 1970."""
    ended_at: float
    attributes: Attributes = {}
    events: Sequence[SpanEvent] = ()
    links: Sequence[TraceContext] = ()
    """Spans that this one did work for, which are not its parents."""
    kind: Kind = "internal"
    error: str = ""
    """The reason of the failure; "" if there was none."""
    ttft_seconds: float | None = None
    """Time to the first token, by which slow requests are told apart. None: there was none."""
    is_notable: bool = False
    """Something happened that operators look for: a refusal, a failover, a preemption."""


class KeepRule(msgspec.Struct, frozen=True):
    """Says which spans are exported. Each process decides by what it has seen itself: a request that is slow for its
    shard is so for its router and its edge, too, so the spans above one that is kept are kept as well."""

    slow_ttft_seconds: float
    slow_seconds: float

    def keeps(self, span: Span) -> bool:
        """Return True for spans of sampled traces, and for those that failed, were slow or are notable."""
        return (
            span.context.is_sampled
            or bool(span.error)
            or span.is_notable
            or span.ended_at - span.began_at >= self.slow_seconds
            or (span.ttft_seconds is not None and span.ttft_seconds >= self.slow_ttft_seconds)
        )
