"""The whole configuration, and its small sections.

Traces of requests.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvloom_common.config.edge import EdgeConfig
from kvloom_common.config.fabric import MOVED_TO_FABRIC, FabricConfig, ResumeConfig
from kvloom_common.config.models import ModelConfig
from kvloom_common.config.router import RouterConfig
from kvloom_common.config.routes import RouteConfig, ShadowConfig
from kvloom_common.config.section import (
    AT_START,
    BY_ALL,
    BY_EDGES,
    BY_ORCHESTRATOR,
    BY_ROUTERS,
    BY_ROUTERS_AND_EDGES,
    BY_ROUTERS_AND_SAFETY,
    BY_SAFETY,
    BY_SHARDS,
    FOLLOWED,
    FilePath,
    Flag,
    Port,
    PositiveFloat,
    Section,
)
from kvloom_common.config.shard import ShardConfig
from kvloom_common.config.tenants import CallersConfig, ControlConfig, OrchestratorConfig, TlsConfig


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


class SafetyConfig(Section):
    """The safety service, and what happens when it is missing."""

    moved = {name: MOVED_TO_FABRIC[name] for name in ("reflection", "drain_timeout_seconds")}

    host: Annotated[str, AT_START] = "127.0.0.1"
    port: Annotated[Port, AT_START] = 0
    discover: Annotated[bool, AT_START] = False
    """True makes routers use the safety services that announce themselves in Redis, too: one after the other, until one
    can be reached, and the one at `host` and `port` first. `kvloom up` sets it for a fleet."""
    policy_file: FilePath = ""
    """A TOML file with the rules, reloaded when it changes. Empty: the built-in policy."""
    audit_dir: Annotated[FilePath, BY_ROUTERS_AND_SAFETY] = ""
    """The directory in which the service logs what its rules find, and routers what such answers follow from, so that
    it can be verified and erased (docs/operate/audit.md). Empty: only the ordinary log has it."""
    audit_retention_days: Annotated[int, Meta(ge=0)] = 30
    """How long the audit log's excerpts can be read. 0: until they are erased."""
    audit_retention_by_tenant: dict[str, Annotated[int, Meta(ge=0)]] = {}
    """The same for tenants with another one: {"acme/web" = 7}."""
    answer_mode: Annotated[Literal["gate", "async", "off"], BY_ROUTERS] = "gate"
    """gate: text is held until it is screened. async: text is sent at once, and the request is halted on a hit."""
    on_unavailable: Annotated[Literal["refuse", "allow"], BY_ROUTERS] = "refuse"
    """Requests are refused or let through while the safety service cannot be reached."""
    patience_seconds: Annotated[float, Meta(ge=0), BY_ROUTERS] = 5.0
    """How long requests wait for a lost safety service before `on_unavailable` applies. Meanwhile no unscreened text is
    shown. 0: they do not wait."""


class RedisConfig(Section):
    """The Redis server with the registry and the edges' journals."""

    url: Annotated[
        str,
        Flag(
            "redis-url",
            "Use this Redis-protocol server instead of the embedded one. Machines that share one are a fleet.",
            metavar="URL",
            alias="join",
        ),
    ] = ""
    """redis://host:port/db. Empty: `kvloom up` starts an embedded server."""
    key_prefix: str = "kvloom"


class LogConfig(Section):
    """The logs of all processes."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"
    access: Literal["on", "off"] = "on"
    """Logs a line when a request ends, also for one that was refused: by the edge for every HTTP request, by the router
    for every RPC, by a shard for every sequence."""
    access_sample_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """The share of requests that are logged. It is drawn by the caller's request id, so that all processes log the same
    requests."""


class MetricsConfig(Section):
    """Where routers, shards and the safety service serve /metrics (docs/reference/metrics.md). Edges serve it on
    `edge.host`."""

    host: str = "127.0.0.1"
    """Other addresses than loopback need TLS and API keys, like those for clients."""
    port: Annotated[
        Port,
        Flag(
            "metrics-port",
            "The first of the ports for /metrics: safety service, routers, edges, control, orchestrator, shards.",
            default="free ones",
        ),
    ] = 0
    """The first of consecutive ports that `kvloom up` gives to its processes: to the safety service, the routers, the
    edges and the shards, in this order. 0: each process picks a free port."""


class KvloomConfig(Section):
    """The whole configuration."""

    data_dir: Annotated[FilePath, AT_START] = ""
    """The directory in which `kvloom up` keeps logs, sockets and converted models. Empty: ~/.kvloom."""
    model: Annotated[ModelConfig, BY_SHARDS] = msgspec.field(default_factory=ModelConfig)
    """The model, or the first one of several."""
    models: Annotated[list[ModelConfig], FOLLOWED] = []
    """Further models. Where nothing is said of `model`, these are all."""
    routes: Annotated[list[RouteConfig], Meta(max_length=256), BY_ROUTERS_AND_EDGES] = []
    """Names that stand for one of several models, chosen by rules and shares."""
    shadows: Annotated[list[ShadowConfig], Meta(max_length=64), BY_ROUTERS] = []
    """Candidates that are compared with models on a share of their answers."""
    edge: Annotated[EdgeConfig, BY_EDGES] = msgspec.field(default_factory=EdgeConfig)
    router: Annotated[RouterConfig, BY_ROUTERS] = msgspec.field(default_factory=RouterConfig)
    shard: Annotated[ShardConfig, BY_SHARDS] = msgspec.field(default_factory=ShardConfig)
    resume: Annotated[ResumeConfig, BY_ROUTERS_AND_EDGES] = msgspec.field(default_factory=ResumeConfig)
    safety: Annotated[SafetyConfig, BY_SAFETY] = msgspec.field(default_factory=SafetyConfig)
    fabric: Annotated[FabricConfig, AT_START] = msgspec.field(default_factory=FabricConfig)
    callers: Annotated[CallersConfig, BY_ALL] = msgspec.field(default_factory=CallersConfig)
    control: Annotated[ControlConfig, BY_ROUTERS_AND_EDGES] = msgspec.field(default_factory=ControlConfig)
    orchestrator: Annotated[OrchestratorConfig, BY_ORCHESTRATOR] = msgspec.field(default_factory=OrchestratorConfig)
    tls: Annotated[TlsConfig, BY_ALL] = msgspec.field(default_factory=TlsConfig)
    redis: Annotated[RedisConfig, AT_START] = msgspec.field(default_factory=RedisConfig)
    metrics: Annotated[MetricsConfig, AT_START] = msgspec.field(default_factory=MetricsConfig)
    log: Annotated[LogConfig, BY_ALL] = msgspec.field(default_factory=LogConfig)
    tracing: Annotated[TracingConfig, BY_ALL] = msgspec.field(default_factory=TracingConfig)
