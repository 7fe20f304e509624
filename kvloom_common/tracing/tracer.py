"""Sends spans to a collector over OTLP/gRPC by OpenTelemetry's SDK, in a thread of its own. What the collector does
not take in time is dropped: requests never wait for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import structlog

from kvloom_common.config.tree import TracingConfig
from kvloom_common.process.extras import MissingPackageError, naming_extras
from kvloom_common.process.service import StartError
from kvloom_common.tracing.spans import KeepRule, Span
from kvloom_common.tracing.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = structlog.get_logger()

MAX_QUEUED_SPANS: Final = 8192
MAX_EXPORTED_SPANS: Final = 512
EXPORT_SECONDS: Final = 1.0
"""How long spans wait for others, to be sent together."""
_CLOSE_SECONDS: Final = 5.0
_NANOS: Final = 10**9


class Tracer:
    """The spans of one process."""

    def __init__(self, config: TracingConfig, role: str, name: str, exporter: SpanExporter) -> None:
        """`role` and `name` are the process's. `exporter` is the tracer's own from now on."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self.sample_share = config.sample_share
        self._rule = KeepRule(config.slow_ttft_seconds, config.slow_seconds)
        self._resource = Resource({"service.name": f"kvloom-{role}", "service.instance.id": name})
        self._scope = InstrumentationScope("kvloom")
        self._processor = BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            max_export_batch_size=MAX_EXPORTED_SPANS,
            schedule_delay_millis=EXPORT_SECONDS * 1e3,
        )

    def write(self, span: Span, *parts: Span) -> None:
        """Export a span that has ended, and its parts, if the rules keep it. Never waits."""
        if self._rule.keeps(span):
            for kept in (span, *parts):
                self._processor.on_end(_readable(kept, self._resource, self._scope))

    async def watch(self) -> None:
        """Run until cancelled, and then send what is left, for a few seconds at most."""
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.shield(asyncio.to_thread(self._close))

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            self._processor.force_flush(round(_CLOSE_SECONDS * 1e3))
        self._processor.shutdown()


def open_tracer(
    config: TracingConfig, role: str, name: str, new_exporter: Callable[[str], Any] | None = None
) -> Tracer | None:
    """Return the tracer of a process; None where there are no traces. `new_exporter` makes the exporter for an
    endpoint, in tests. Raises StartError if OpenTelemetry is not installed."""
    if not config.otlp_endpoint:
        return None
    try:
        with naming_extras():
            exporter = (new_exporter or _otlp_exporter)(config.otlp_endpoint)
            tracer = Tracer(config, role, name, exporter)
    except MissingPackageError as error:
        raise StartError(f"tracing.otlp_endpoint: {error}") from error
    log.info("tracing_started", otlp_endpoint=config.otlp_endpoint, sample_share=config.sample_share)
    return tracer


def _otlp_exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_CLOSE_SECONDS)


def _readable(span: Span, resource: Any, scope: Any) -> Any:
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode

    context = span.context
    return ReadableSpan(
        span.name,
        context=_context(context, context.span_id),
        parent=_context(context, span.parent_id) if span.parent_id else None,
        resource=resource,
        attributes=dict(span.attributes),
        events=[Event(event.name, dict(event.attributes), round(event.at * _NANOS)) for event in span.events],
        links=[Link(_context(link, link.span_id)) for link in span.links],
        kind=SpanKind.SERVER if span.kind == "server" else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=round(span.began_at * _NANOS),
        end_time=round(span.ended_at * _NANOS),
        instrumentation_scope=scope,
    )


def _context(trace: TraceContext, span_id: int) -> Any:
    """Return the context of a kept span, which is sampled as far as the SDK is concerned."""
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(trace.trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
