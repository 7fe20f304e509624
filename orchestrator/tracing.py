"""The orchestrator's spans: what edges ask of it, and what it asks of edges for background responses, batches and
embeddings. The latter are the parents of the edges' spans, and so stand above those of routers."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Iterator

import xxhash

from kvloom.errors import KvloomError
from kvloom_common.tracing import attributes as names
from kvloom_common.tracing.spans import Span, Value
from kvloom_common.tracing.trace_context import TraceContext, is_drawn, parse_traceparent
from kvloom_common.tracing.tracer import Tracer


class OrchestratorTracing:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @contextlib.contextmanager
    def answering(self, call: str, metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[None]:
        """Write the span of a call, below the request for which the edge calls. Without one there is no span."""
        sent = next((value for key, value in metadata if key == "traceparent"), "")
        parent = parse_traceparent(sent) if isinstance(sent, str) else None
        if parent is None:
            yield
            return
        own = TraceContext(parent.trace_id, secrets.randbits(64) or 1, parent.is_sampled)
        with self._written(f"store {call}", own, parent.span_id, {}):
            yield

    @contextlib.contextmanager
    def asking(self, path: str, tenant: str, key: str) -> Iterator[tuple[TraceContext, dict[str, Value]]]:
        """Write the span of a request to an edge, with the attributes that it has in the end. All tries with one
        idempotency key are one trace."""
        trace_id = (xxhash.xxh3_128_intdigest(key.encode()) if key else secrets.randbits(128)) or 1
        own = TraceContext(trace_id, secrets.randbits(64) or 1, is_drawn(trace_id, self._tracer.sample_share))
        attributes: dict[str, Value] = {names.TENANT: tenant, names.HTTP_ROUTE: path}
        if key:
            attributes[names.REQUEST_ID] = key
        with self._written(f"work {path}", own, 0, attributes):
            yield own, attributes

    @contextlib.contextmanager
    def _written(self, name: str, own: TraceContext, parent_id: int, attributes: dict[str, Value]) -> Iterator[None]:
        began_at, error = time.time(), ""
        try:
            yield
        except KvloomError as failure:
            error = failure.reason_name.lower() if failure.kind.http_status >= 500 else ""
            raise
        except Exception as failure:
            error = type(failure).__name__
            raise
        finally:
            status = attributes.get(names.HTTP_STATUS)
            if isinstance(status, int) and status >= 400:
                error = str(status) if status >= 500 else ""
            self._tracer.write(Span(name, own, parent_id, began_at, time.time(), attributes, error=error))
