"""The W3C trace context (https://www.w3.org/TR/trace-context/), and the ids of spans.

An edge gives each request a context of its own, a child of the one that its client sent, and passes it on. The other
processes derive the ids of their spans from it: a router need not tell a shard which span is the parent.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
import xxhash

_HEADER: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_DRAWN_BITS: Final = 56
"""The last 7 bytes of a trace id are random (level 2 of the recommendation)."""


class TraceContext(msgspec.Struct, frozen=True):
    """A span, as other processes refer to it."""

    trace_id: int
    """128 bits, not 0."""
    span_id: int
    """64 bits, not 0."""
    is_sampled: bool

    @property
    def header(self) -> str:
        """The value of `traceparent`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"

    def child(self, name: str) -> TraceContext:
        """Return the span of this name below this one. Every process that knows both gets the same."""
        key = f"{self.trace_id:032x}{self.span_id:016x}{name}".encode()
        return TraceContext(self.trace_id, xxhash.xxh3_64_intdigest(key) or 1, self.is_sampled)


def router_span(edge: TraceContext, request_id: str) -> TraceContext:
    """Return the router's span of a request: the parent of those of shards and of the safety service. `edge` is the
    span that the request came with."""
    return edge.child(f"router {request_id}")


def parse_traceparent(text: str) -> TraceContext | None:
    """Read the value of `traceparent`. Returns None if it is malformed, or of the version ff, which is invalid."""
    found = _HEADER.fullmatch(text)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    return TraceContext(trace_id, span_id, bool(int(found[4], 16) & 1)) if trace_id and span_id else None


def is_drawn(trace_id: int, share: float) -> bool:
    """Tell whether a trace is one of the `share` of all traces that are kept whatever happens. All processes agree."""
    return (trace_id & ((1 << _DRAWN_BITS) - 1)) < share * (1 << _DRAWN_BITS)
