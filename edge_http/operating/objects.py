"""The types of answers to operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from edge_http.admin.operations import type_of
from kvloom.v1 import overview_pb2, router_service_pb2, supervisor_service_pb2
from kvloom_common.overview.time_parts import WhereTimeWent

if TYPE_CHECKING:
    _Shard = _Request = _Sample = _Explanation = _Rollout = dict[str, Any]
else:
    _Shard = type_of(overview_pb2.ShardOverview.DESCRIPTOR)
    _Request = type_of(overview_pb2.RequestOverview.DESCRIPTOR)
    _Sample = type_of(overview_pb2.FleetSample.DESCRIPTOR)
    _Explanation = type_of(router_service_pb2.ExplainResponse.DESCRIPTOR)
    _Rollout = type_of(supervisor_service_pb2.RolloutState.DESCRIPTOR)


class Access(msgspec.Struct):
    has_tenants: bool
    is_operator: bool
    organisation: str
    """That which the caller administers; "": the whole fabric."""


class RouterState(msgspec.Struct):
    router_id: str
    draining: bool
    num_live_requests: int
    num_queued_requests: int


class FleetNow(msgspec.Struct):
    """The lists are those of `OverviewService.GetOverview` (docs/reference/grpc-api.md), of all routers together."""

    at_seconds: float
    """In seconds since 1970."""
    routers: list[RouterState]
    shards: list[_Shard]
    """Only for operators of the whole fabric, like samples."""
    running: list[_Request]
    ended: list[_Request]
    samples: list[_Sample]
    ttft_bounds: list[float]
    """The upper bounds of ttft_counts, in seconds."""


class ExplainedRequest(msgspec.Struct):
    explanation: _Explanation
    """The same as `RouterService.Explain` answers."""
    time: WhereTimeWent | None
    """Null while it runs."""


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    shard_id: str
    draining: bool = True
    """False ends the drain."""
    deadline_seconds: float | None = None
    """After it, running requests move to other shards; null: they stay until they end."""


class DrainedShard(msgspec.Struct):
    num_running: int
    num_waiting: int


class RolloutList(msgspec.Struct):
    data: list[_Rollout]


class RollbackBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    """The model, or one of the two versions."""


class Done(msgspec.Struct):
    done: bool = True


class AdminUsage(msgspec.Struct):
    """The same as /v1/usage answers, for all tenants or an organisation's."""

    object: str
    data: list[dict[str, Any]]
    has_more: bool
    budgets: list[dict[str, Any]]
    """With `tenant`: its budgets."""
