"""The configuration of what edges, routers, shards and the safety service have in common."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from kvloom_common.config.section import (
    BY_ALL,
    BY_ROUTERS_AND_EDGES,
    CellName,
    FilePath,
    Flag,
    PositiveFloat,
    Section,
    always,
)

MOVED_TO_FABRIC: Final = {
    name: f"It is now fabric.{name}, for all processes"
    for name in (
        "request_timeout_seconds",
        "drain_timeout_seconds",
        "max_memory_bytes",
        "is_pinned_to_cpu",
        "reflection",
    )
}
"""Keys that edges, routers, shards and the safety service had each of their own."""
MOVED_TO_CALLERS: Final = {
    "max_concurrent_requests_per_caller": "It is now callers.max_concurrent_requests, for edges and routers",
    "max_connections": "It is now callers.max_connections, for edges and routers",
    "max_connections_per_address": "It is now callers.max_connections_per_address, for edges and routers",
}


class ResumeConfig(Section):
    """Streams that can be resumed after their connection was lost (docs/reference/http-api.md,
    docs/reference/grpc-api.md)."""

    moved = always(
        max_unattended="1024", max_journal_bytes="32 MiB", max_kept_answer_bytes="64 MiB", commit_seconds="0.2"
    )
    grace_seconds: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """How long a response waits for its client to return before it is cancelled and dropped. 0: it does not wait."""
    by_default: bool = False
    """True makes streams resumable if their clients do not choose (`x-kvloom-resume`, `GenerateRequest.resumable`).
    Streams that break off for good then cost up to `grace_seconds` of generation."""
    max_response_bytes: Annotated[int, Meta(ge=4096)] = 4 * 2**20
    """The size of the events kept of one response. The oldest are dropped first."""
    max_bytes: Annotated[int, Meta(ge=4096)] = 256 * 2**20
    """The size of the events kept of all responses of a process."""
    idempotency_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 600.0
    """How long an edge keeps a complete answer to a request with an `Idempotency-Key` for repeats of the request, a
    streamed one after its last reader. 0: repeats get the answer only while it is made."""
    advertised_address: str = ""
    """host:port where the other edges reach this one. Empty: where it listens. Set it when `edge.host` is a wildcard,
    otherwise only this edge can resume its streams. For edges that share a port only the host is used, because each
    has its own port as well."""


class FabricConfig(Section):
    """Settings that the processes of one fabric have in common, besides the model."""

    secret_file: Annotated[
        FilePath,
        Flag("secret-file", "The file with the fabric's secret.", default="DATA_DIR/secret, made at the first start"),
    ] = ""
    """The file with the fabric's secret (docs/operate/security.md), by which its processes recognise one another.
    Empty: `kvloom up` makes one in the data directory; a service that is started by itself takes the secret from the
    environment variable KVLOOM_FABRIC_SECRET, and works without one if that is not set."""
    roles: Annotated[
        list[Literal["edge", "router", "shard", "safety", "control", "orchestrator"]],
        Flag("role", "What this machine of a fleet has. May be repeated.", default="all"),
    ] = []
    """The roles that `kvloom up` starts on this machine. Empty: all."""
    host: str = ""
    """Where processes listen for the other processes of their fabric, which all need its secret. Empty: `router.host`,
    `shard.host`, `safety.host` and `edge.host`."""
    advertised_host: Annotated[
        str,
        Flag(
            "advertise",
            "The host by which the other machines of a fleet reach this one (docs/operate/fleet.md).",
            metavar="HOST",
        ),
    ] = ""
    """The host by which other machines reach the processes of this one. Empty: `host`, or the machine's name where
    `host` is a wildcard."""
    name_prefix: Annotated[
        str,
        Meta(pattern=r"^([a-z0-9][a-z0-9-]{0,31})?$"),
        Flag(
            "name-prefix",
            "What the names of the processes begin with: names are unique in a fleet.",
            default="from --advertise",
            metavar="TEXT",
        ),
    ] = ""
    """The names of the processes that `kvloom up` starts begin with this. Names are unique in a fleet, so machines that
    share a Redis need different prefixes."""
    cell: Annotated[CellName, BY_ROUTERS_AND_EDGES] = ""
    """The name of the cell that this fabric is, if edges know several (docs/operate/regions.md)."""
    request_timeout_seconds: Annotated[PositiveFloat, BY_ROUTERS_AND_EDGES] = 600.0
    """How long a request may take that does not say it."""
    drain_timeout_seconds: Annotated[PositiveFloat, BY_ALL] = 30.0
    """How long a process that stops lets what it serves end: requests, or streams of processes that change over to its
    successor."""
    max_memory_bytes: Annotated[int, Meta(ge=0), BY_ROUTERS_AND_EDGES] = 0
    """The resident memory of an edge's or router's process. From 85% of it on, large requests are refused, and from
    100% on all new ones; running answers continue. 0: a quarter of the memory of the machine or the cgroup."""
    is_pinned_to_cpu: Annotated[bool, BY_ROUTERS_AND_EDGES] = True
    """True keeps the event loop of an edge or router on one CPU while nothing else keeps it busy
    (kvloom_common/process/cpu_affinity.py)."""
    reflection: Annotated[bool, BY_ALL] = True
    """True makes gRPC reflection describe the services to anyone who can connect."""
