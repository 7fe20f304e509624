"""Traces of requests."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvloom_common.config.section import Flag, PositiveFloat, Section


class TracingConfig(Section):
    """Traces of requests from the edge to the engine (docs/operate/traces.md)."""

    otlp_endpoint: Annotated[
        str,
        Meta(pattern=r"^(https?://[^\s/]+/?)?$"),
        Flag(
            "otlp-endpoint",
            "Send traces to this OpenTelemetry collector over OTLP/gRPC.",
            default="no traces",
            metavar="URL",
        ),
    ] = ""
    """http://host:4317, or https:// with TLS. Empty: there are no traces, and they cost nothing. OpenTelemetry's own
    variables OTEL_EXPORTER_OTLP_HEADERS and OTEL_EXPORTER_OTLP_CERTIFICATE apply."""
    sample_share: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """The share of the requests whose traces are kept whatever happens. Requests whose client has sampled its own trace
    (`traceparent`) are kept, too."""
    slow_ttft_seconds: PositiveFloat = 2.0
    """Requests whose first token took longer are kept, as are those that failed, were refused, or moved."""
    slow_seconds: PositiveFloat = 30.0
    """Requests that took longer are kept."""
