"""The configuration of the HTTP edges, and of streams that can be resumed."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvloom_common.config.section import (
    AT_START,
    BY_ROUTERS_AND_EDGES,
    Address,
    FilePath,
    Flag,
    Port,
    PositiveFloat,
    PositiveInt,
    Section,
)

_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@,A-Z]+")


class ResumeConfig(Section):
    """Streams that can be resumed after their connection was lost (docs/http-api.md, docs/grpc-api.md)."""

    grace_seconds: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """How long a response waits for its client to return before it is cancelled and dropped. 0: it does not wait."""
    by_default: bool = False
    """True makes streams resumable if their clients do not choose (`x-kvloom-resume`, `GenerateRequest.resumable`).
    Streams that break off for good then cost up to `grace_seconds` of generation."""
    max_unattended: PositiveInt = 1024
    """Running answers that no client reads. If there are more, those that have waited longest are cancelled."""
    max_response_bytes: Annotated[int, Meta(ge=4096)] = 4 * 2**20
    """The size of the events kept of one response. The oldest are dropped first."""
    max_bytes: Annotated[int, Meta(ge=4096)] = 256 * 2**20
    """The size of the events kept of all responses of a process."""


class EdgeResumeConfig(ResumeConfig):
    """Resumable streams of an edge, which other edges can continue."""

    commit_seconds: Annotated[float, Meta(ge=0, le=10)] = 0.2
    """How long an event of a resumable stream may wait until Redis has it, so that another edge can continue exactly
    after the client's last event when this edge dies. Mostly it takes less than a millisecond. 0: events do not wait,
    and Redis gets them ten times a second; a client that has seen more than Redis then cannot resume."""
    max_journal_bytes: Annotated[int, Meta(ge=2 * 2**20)] = 32 * 2**20
    """The size of an edge's latest events in Redis, which other edges read after it has died."""
    idempotency_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 600.0
    """How long a complete answer to a request with an `Idempotency-Key` is kept for repeats of the request, a streamed
    one after its last reader. 0: repeats get the answer only while it is made."""
    max_kept_answer_bytes: Annotated[int, Meta(ge=4096)] = 64 * 2**20
    """The size of all answers together that are kept for `Idempotency-Key`s and are not streamed. The oldest are
    dropped first, and one caller may have half of it. An answer over `max_response_bytes` is not kept."""
    advertised_address: str = ""
    """host:port where the other edges reach this one. Empty: where it listens. Set it when `edge.host` is a wildcard,
    otherwise only this edge can resume its streams. For edges that share a port only the host is used, because each
    has its own port as well."""


class EdgeConfig(Section):
    """The HTTP edges."""

    host: Annotated[str, AT_START, Flag("host", "The address on which the HTTP and gRPC ports listen.")] = "127.0.0.1"
    port: Annotated[Port, AT_START, Flag("http-port", "The port of the HTTP API and chat page. 0 picks one.")] = 8080
    root_path: Annotated[str, Meta(pattern=r"^(/[A-Za-z0-9._~-]+)*$", max_length=256)] = ""
    """The path below which a proxy serves the edges, e.g. "/llm": requests may have it or not, and the pages and
    /openapi.json name it. Empty: there is none."""
    num_edges: Annotated[
        int, Meta(ge=1, le=256), AT_START, Flag("edges", "The number of HTTP edges. They share the port.")
    ] = 1
    """How many edges `kvloom up` starts. They share the port."""
    colocate: Annotated[
        bool, AT_START, Flag("colocate", "Run a router inside each edge, which saves one hop per token.")
    ] = False
    """True makes `kvloom up` put a router into each edge's process, instead of starting `router.num_routers`."""
    max_body_bytes: PositiveInt = 4 * 2**20
    max_header_bytes: PositiveInt = 16 * 2**10
    max_messages: PositiveInt = 4096
    max_buffered_bytes: PositiveInt = 256 * 2**10
    """The bytes that may wait for a slow reader, per stream. Beyond that the request is cancelled."""
    stream_keep_alive_seconds: Annotated[float, Meta(ge=0)] = 10.0
    """After so long without an event a stream gets an SSE comment (of /v1/messages a `ping`), so that no proxy cuts it.
    0: never."""
    stream_head_seconds: Annotated[float, Meta(ge=0)] = 0.5
    """A stream that was not refused in this time begins, with status 200 and headers, before twice the time is over.
    From then on an error is an event. 0: it begins with its first token, or with what keeps it alive."""
    max_concurrent_requests: PositiveInt = 8192
    max_concurrent_requests_per_caller: PositiveInt = 4096
    """Running requests of one caller (docs/http-api.md). Beyond that it gets a 429, while the others are served."""
    max_connections: PositiveInt = 16_384
    """Connections open at a time. Further ones get a 503 and are closed."""
    max_connections_per_address: PositiveInt = 8192
    """Connections open at a time from one IPv4 address or one IPv6 network of 64 bits. Further ones get a 429 and are
    closed. Trusted proxies may have any number."""
    trusted_proxies: Annotated[list[str], BY_ROUTERS_AND_EDGES] = []
    """The networks (CIDR) of reverse proxies in front of the edges. A request from one of them counts as that of the
    last address in X-Forwarded-For that is not in these networks."""
    cors_origins: list[str] = []
    """The origins of web pages that may use the API from a browser, e.g. "https://chat.example.com"; "*": all. Empty:
    only pages of the edge itself."""
    api_docs: bool = True
    """True describes the API at /openapi.json and /docs, also to callers without an API key."""
    strict_fields: bool = False
    """True refuses requests with fields that are not known (docs/http-api.md). The header x-kvloom-strict says it for
    one request."""
    allow_adapter_changes: bool = False
    """True serves POST /v1/load_lora_adapter and /v1/unload_lora_adapter, to all callers of the API."""
    adapters_dir: FilePath = ""
    """The directory below which adapters are that these may load."""
    max_pending_body_bytes: Annotated[int, Meta(ge=4 * 2**20)] = 256 * 2**20
    """The size of all bodies together that are being received or parsed. Beyond that requests are rejected at once."""
    max_answer_bytes: Annotated[int, Meta(ge=4096)] = 32 * 2**20
    """The size of an answer that is not streamed. Beyond that the request is cancelled."""
    max_pending_answer_bytes: Annotated[int, Meta(ge=2**20)] = 256 * 2**20
    """The size of all answers together that are not streamed, while they are collected and sent. Beyond that the
    answer that needs more fails."""
    max_memory_bytes: Annotated[int, Meta(ge=0)] = 0
    """The resident memory of an edge's process. From 85% of it on, large requests are refused, and from 100% on all new
    ones; running answers continue. 0: a quarter of the memory of the machine or the cgroup."""
    header_timeout_seconds: PositiveFloat = 10.0
    """The time from a connection's start, or the first byte of a later request, to the end of the headers."""
    body_timeout_seconds: PositiveFloat = 60.0
    """The time from the end of the headers to the end of the body."""
    request_timeout_seconds: PositiveFloat = 600.0
    drain_timeout_seconds: PositiveFloat = 30.0
    is_pinned_to_cpu: bool = True
    """True keeps the event loop on one CPU while nothing else keeps it busy (kvloom_common/process/cpu_affinity.py)."""
    routers: list[Address] = []
    """host:port of each router. Empty: the one of [router], and all that announce themselves in Redis."""
    reattach_seconds: Annotated[float, Meta(ge=0, le=600)] = 10.0
    """How long an answer that has lost its router may look for another one that continues it. 0: it fails at once."""
    resume: EdgeResumeConfig = msgspec.field(default_factory=EdgeResumeConfig)

    def __post_init__(self) -> None:
        if self.allow_adapter_changes and not self.adapters_dir:
            raise ValueError("allow_adapter_changes needs adapters_dir")
        for network in self.trusted_proxies:
            ipaddress.ip_network(network)  # a ValueError names the network, and msgspec adds the key
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin such as https://chat.example.com, nor *")
        if "*" in self.cors_origins and len(self.cors_origins) > 1:
            raise ValueError("cors_origins has both * and single origins")
