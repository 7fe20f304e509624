"""A collector of OpenTelemetry's protocol (OTLP/gRPC) that keeps the spans it gets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import grpc
import msgspec
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.proto.trace.v1.trace_pb2 import Status as SpanStatus

MAX_SPANS: Final = 100_000
_NANOS: Final = 1e9


class CollectedEvent(msgspec.Struct, frozen=True):
    """An event of a span."""

    name: str
    at: float
    """Seconds since 1970."""
    attributes: Mapping[str, Any]


class CollectedSpan(msgspec.Struct, frozen=True):
    """A span as it arrived. Ids are hexadecimal."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """"" if it has no parent."""
    began_at: float
    """Seconds since 1970."""
    ended_at: float
    attributes: Mapping[str, Any]
    events: Sequence[CollectedEvent]
    links: Sequence[str]
    """The span ids that it refers to."""
    error: str
    """The reason of the failure; "" if there was none."""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps at most MAX_SPANS spans, and drops later ones."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        """Return the spans of one trace, the earliest first."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.began_at)

    async def Export(  # noqa: N802  (gRPC's name)  # pyrefly: ignore[bad-override]
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        del context  # gRPC's name of it, which must stay
        for of_process in request.resource_spans:
            resource = _values(of_process.resource.attributes)
            for scope in of_process.scope_spans:
                self.spans += [_collected(span, resource) for span in scope.spans]
        del self.spans[MAX_SPANS:]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.asynccontextmanager
async def collecting(port: int = 0) -> AsyncIterator[tuple[Collector, str]]:
    """Run a collector on this machine. Yields it and its endpoint. Raises RuntimeError if the port is taken."""
    collector, server = Collector(), grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{bound}"
    finally:
        await server.stop(None)


def _collected(span: Span, resource: Mapping[str, Any]) -> CollectedSpan:
    return CollectedSpan(
        resource.get("service.name", ""),
        resource.get("service.instance.id", ""),
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano / _NANOS,
        span.end_time_unix_nano / _NANOS,
        _values(span.attributes),
        [CollectedEvent(event.name, event.time_unix_nano / _NANOS, _values(event.attributes)) for event in span.events],
        [link.span_id.hex() for link in span.links],
        span.status.message if span.status.code == SpanStatus.STATUS_CODE_ERROR else "",
    )


def _values(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(entry) for entry in value.array_value.values]
    return None if kind is None else getattr(value, kind)
