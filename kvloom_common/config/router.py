"""The configuration of the routers."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvloom_common.config.brownout import BrownoutConfig
from kvloom_common.config.fabric import MOVED_TO_CALLERS, MOVED_TO_FABRIC
from kvloom_common.config.section import (
    AT_START,
    BY_ROUTERS_AND_EDGES,
    Address,
    FilePath,
    Flag,
    Port,
    PositiveFloat,
    PositiveInt,
    ReadBy,
    Section,
    always,
)

_CLASS_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class PlacementConfig(Section):
    """How the router chooses a shard for a request."""

    policy: str = "ect"
    """The name of a policy in router/core/placement ("ect", "round_robin", "least_requests" ...) or of a plugin's."""
    prefill_chunks: bool = True
    """True makes the default policy split long prompts into prefill chunks, between which shorter prompts are prefilled
    (docs/concepts/routing.md). The engines must keep prefixes in their cache."""


class DecisionLogConfig(Section):
    """Says which placements are kept for `kvloom explain`, and in which file, if any."""

    moved = always(max_bytes="64 MiB")

    sample_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """The share of the requests that are recorded, chosen by a hash of their ids. 0: none."""
    max_remembered: PositiveInt = 4096
    """How many of the latest requests are kept in memory."""
    path: FilePath = ""
    """JSON lines (docs/how-to/routing-decisions.md) are appended to this file, one for each recorded request that
    ended. Each router needs its own file, which is renamed to `path` + ".1" at 64 MiB. Empty: no file is written."""
    named: bool = False
    """True writes the names of tenants and the ids of keys to the file, by which `kvloom whatif` finds their limits.
    False writes hashes of them."""


class OverloadConfig(Section):
    """Says what happens when the load exceeds the capacity of the shards (docs/operate/reliability.md)."""

    moved = always(ramp_start_requests="8", sheds_load_early="true")
    outage_patience_seconds: Annotated[float, Meta(ge=0)] = 5.0
    """How long admitted requests wait for a shard when the last one is lost."""
    start_patience_seconds: Annotated[float, Meta(ge=0), BY_ROUTERS_AND_EDGES] = 0.0
    """How long new requests wait while their model has no shard, so that one can be started for them
    (docs/operate/autoscaling.md). 0: they are rejected at once."""


class FairnessConfig(Section):
    """How tenants (or callers) share the shards when one of them fills them (docs/concepts/fairness.md)."""

    moved = {
        "reserved_share": "It is always an eighth: delete the line, or give classes a reserved_share",
        "contention_seconds": "It is always 30: delete the line",
        "prompt_token_weight": "It is always 1: delete the line",
        "output_token_weight": "It is always 2: delete the line",
        **always(preempt_after_seconds="0.25", competing_prefill_seconds="0.05"),
    }
    enabled: bool = True
    """True makes running answers of a tenant above its share wait while other tenants are served."""


class PriorityClassConfig(Section):
    """A class of requests (docs/concepts/scheduling.md)."""

    name: str
    """Requests name the class by it. "interactive" and "batch" are the classes of requests that name none."""
    rank: Annotated[int, Meta(ge=0, le=15)]
    """The lower, the more urgent. The built-in classes have 0 (judge), 1 (interactive), 2 (batch) and 3 (shadow
    traffic)."""
    weight: PositiveFloat = 1.0
    """The share among classes of one rank."""
    reserved_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """The part of each shard's batch and KV blocks that other classes leave to this one while it has work."""
    aging_seconds: PositiveFloat = 30.0
    """After how long a waiting request counts as one rank more urgent."""
    max_queue_seconds: PositiveFloat | None = None
    """How long a request may wait; by default `router.max_queue_seconds`."""

    def __post_init__(self) -> None:
        if not _CLASS_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a name of lower-case letters, digits, - and _, of at most 64")


class HealthConfig(Section):
    """When the router suspects a shard. A suspected shard gets no new requests, its running ones continue on other
    shards, and probes, which are requests for one token, find out when it is healthy again
    (docs/operate/reliability.md)."""

    moved = always(
        slow_seconds="10",
        slow_factor="10",
        max_failures="5",
        max_suspected_share="half",
        probe_seconds="1",
        max_probe_seconds="30",
        num_probes="3",
    )
    enabled: bool = True
    stall_seconds: PositiveFloat = 5.0
    """A shard that has work and makes no progress for this long is suspected. The expected time of prefill is added."""


class ResultCacheConfig(Section):
    """Answers to deterministic requests, kept in the router for the tenant that has got them
    (docs/how-to/result-cache.md)."""

    moved = always(max_entries="65,536", max_answer_tokens="1024", shared_timeout_seconds="0.01")
    enabled: Annotated[bool, BY_ROUTERS_AND_EDGES] = False
    ttl_seconds: PositiveFloat = 3600.0
    max_bytes: Annotated[int, Meta(ge=2**16)] = 64 * 2**20
    """The size of one router's cache, in bytes of memory."""
    shared: bool = False
    """True lets routers use one another's answers too, through Redis (encrypted). A request that a router cannot answer
    itself then waits for Redis, at most 10 ms."""


class ReceiptsConfig(Section):
    """Signed receipts, with which answers can be computed again (docs/how-to/receipts.md)."""

    enabled: bool = False
    """True lets requests ask for a receipt."""
    key_file: FilePath = ""
    """The private key; made if it is missing. "": receipts.key in `data_dir`."""


class DisaggregationConfig(Section):
    """Prompts that one shard computes for another (docs/how-to/disaggregation.md), where shards have roles."""

    moved = always(leg_timeout_seconds="30")
    min_prompt_tokens: PositiveInt = 2048
    """The shard of the answer must have at least so many tokens of the prompt to compute."""


class RouterConfig(Section):
    """The routers."""

    moved = {
        **always(max_message_bytes="16 MiB", max_pending_request_bytes="256 MiB", max_streams_per_connection="4096"),
        "resume": "It is now [resume], for edges and routers",
        **MOVED_TO_FABRIC,
        **MOVED_TO_CALLERS,
    }
    host: Annotated[str, AT_START, Flag("host")] = "127.0.0.1"
    port: Annotated[Port, AT_START, Flag("router-port", "The port of the gRPC API. 0 picks one.")] = 8081
    num_routers: Annotated[
        int, Meta(ge=1, le=256), AT_START, Flag("routers", "The number of routers. They share the port.")
    ] = 1
    """How many routers `kvloom up` starts. They share the port, and each has its own port as well."""
    shards: Annotated[
        list[Address],
        Meta(max_length=64),
        Flag(
            "shards-at",
            "Where shards of other machines listen, if they share no Redis. May be repeated.",
            default="in Redis",
            metavar="HOST:PORT",
        ),
    ] = []
    """host:port of shards, in place of those that announce themselves in Redis. A host stands for all its addresses,
    and DNS is asked again every two seconds, as for a headless service of Kubernetes (docs/operate/kubernetes.md).
    Empty: those in Redis."""
    max_queued_requests: PositiveInt = 1024
    """How many requests may be queued for a shard. Beyond that a request is rejected at once."""
    max_queue_seconds: PositiveFloat = 60.0
    max_attempts: PositiveInt = 3
    max_prompt_tokens: PositiveInt = 262_144
    placement: PlacementConfig = msgspec.field(default_factory=PlacementConfig)
    disaggregation: DisaggregationConfig = msgspec.field(default_factory=DisaggregationConfig)
    health: HealthConfig = msgspec.field(default_factory=HealthConfig)
    decision_log: DecisionLogConfig = msgspec.field(default_factory=DecisionLogConfig)
    records_incidents: bool = False
    """True makes each router keep what it was given and what it decided, without prompts and answers, in at most
    128 MiB in `data_dir`/incidents, for `kvloom incident capture` (docs/operate/incidents.md). For fabrics without
    tenants."""
    overload: OverloadConfig = msgspec.field(default_factory=OverloadConfig)
    brownout: BrownoutConfig = msgspec.field(default_factory=BrownoutConfig)
    fairness: FairnessConfig = msgspec.field(default_factory=FairnessConfig)
    result_cache: ResultCacheConfig = msgspec.field(default_factory=ResultCacheConfig)
    receipts: Annotated[ReceiptsConfig, ReadBy(("router", "edge", "shard"))] = msgspec.field(
        default_factory=ReceiptsConfig
    )
    classes: Annotated[list[PriorityClassConfig], Meta(max_length=16), BY_ROUTERS_AND_EDGES] = []
    """Classes of requests beside the built-in ones, or in their place."""

    def __post_init__(self) -> None:
        names = [one.name for one in self.classes]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"classes: {twice!r} is declared twice")
        if sum(one.reserved_share for one in self.classes) >= 1:
            raise ValueError("classes: all reserved_share together must be less than 1")
