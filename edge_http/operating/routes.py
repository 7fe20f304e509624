"""The routes of operators."""

from __future__ import annotations

from typing import Any, Final

from edge_http.endpoints.usage import admin_usage
from edge_http.openapi.route import EVENT_STREAM, Handler, Route, Success
from edge_http.operating import objects
from edge_http.operating.access import access
from edge_http.operating.overview import explained_request, overview, overview_events
from edge_http.operating.rollouts import drain_shard, list_rollouts, roll_back
from edge_http.wire.headers import REQUEST_ID

_ABOUT: Final = (
    "With tenants it needs a key with the scope admin; administrators of an organisation get what is their "
    "organisation's. Without tenants it is only for the edge's own machine."
)


def _route(path: str, method: str, handler: Handler, id_: str, summary: str, answer: Success, **more: Any) -> Route:
    common: dict[str, Any] = {"description": _ABOUT, "parameters": (REQUEST_ID,), **more}
    return Route(
        path=f"/admin/v1/{path}",
        method=method,
        handler=handler,
        id=id_,
        tag="Operators",
        summary=summary,
        answers=(answer,),
        scope="admin",
        is_of_operators=True,
        has_head=False,
        **common,
    )


OPERATING_ROUTES: Final = (
    _route(
        "access", "GET", access, "getAccess", "Tell the caller's rights",
        Success("The caller's rights.", objects.Access), errors=(403,),
    ),
    _route(
        "overview", "GET", overview, "getOverview", "The fleet, its requests, and an hour of samples",
        Success("The overviews of all routers, as one.", objects.FleetNow), errors=(403, 503),
        parameters=(REQUEST_ID, "max_requests", "samples_after"),
    ),
    _route(
        "overview/events", "GET", overview_events, "followOverview", "The same every two seconds, as events",
        Success("Later events have the samples that are new.", objects.FleetNow, EVENT_STREAM), errors=(403, 429, 503),
        parameters=(REQUEST_ID, "max_requests", "samples_after"),
    ),
    _route(
        "requests/{id}", "GET", explained_request, "explainRequest",
        "Explain why a request was slow, and how it was placed",
        Success("The explanation, from the decision log.", objects.ExplainedRequest), errors=(403, 404, 503),
        takes_slashes=True,
    ),
    _route(
        "shards/drain", "POST", drain_shard, "drainShard", "Begin or end the drain of a shard",
        Success("The sequences that the shard still has.", objects.DrainedShard),
        body=objects.DrainBody, errors=(403, 409, 501, 504),
        examples={"A drain": {"shard_id": "shard-0", "deadline_seconds": 30}}, is_of_fabric=True,
    ),
    _route(
        "rollouts", "GET", list_rollouts, "listRollouts", "The rollouts of this machine that have not ended",
        Success("One for each model.", objects.RolloutList), errors=(403, 501, 504), is_of_fabric=True,
    ),
    _route(
        "rollouts/rollback", "POST", roll_back, "rollBack", "Take the new version of a model back",
        Success("It will be done soon.", objects.Done), body=objects.RollbackBody, errors=(403, 409, 501, 504),
        examples={"A model": {"name": "smollm2-135m-instruct"}}, is_of_fabric=True,
    ),
    _route(
        "usage", "GET", admin_usage, "getAdminUsage", "The usage of all tenants, or of an organisation's",
        Success("Sums, and budgets.", objects.AdminUsage), errors=(403, 404, 503),
        parameters=(REQUEST_ID, "first_day", "last_day", "by", "format", "tenant", "organisation"),
    ),
)  # fmt: skip
