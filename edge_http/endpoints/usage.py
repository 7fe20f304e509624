"""GET /v1/usage: what the caller's tenant has used; and /admin/v1/usage, of all tenants or of an organisation's."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiohttp import web

from edge_http.edge import Edge
from edge_http.tenant_usage import CALL_SECONDS, TenantUsage
from edge_http.wire.json_response import json_response
from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1 import usage_service_pb2 as pb
from kvloom.v1.control_service_pb2 import BUDGET_UNIT_NANOS
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.tenancy.prices import decimal
from kvloom_common.tenancy.principal import Principal

GROUPS: Final = {
    "day": pb.USAGE_GROUP_DAY,
    "model": pb.USAGE_GROUP_MODEL,
    "key": pb.USAGE_GROUP_KEY,
    "tier": pb.USAGE_GROUP_TIER,
    "class": pb.USAGE_GROUP_CLASS,
}
ADMIN_GROUPS: Final = {"tenant": pb.USAGE_GROUP_TENANT, **GROUPS}
COLUMNS: Final = (
    "tenant",
    "day",
    "model",
    "key",
    "tier",
    "class",
    "num_requests",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_reasoning_tokens",
    "block_seconds",
    "cost",
)
_PARAMETERS: Final = ("first_day", "last_day", "by", "format")


async def usage(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    principal, service = _metered(edge, request)
    asked, groups = _question(request, GROUPS, _PARAMETERS, "day")
    asked.tenant = principal.tenant
    return await _answer(service, request, asked, groups, principal.tenant, principal.key_id, tenant=principal.tenant)


async def admin_usage(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    principal, service = _metered(edge, request)
    asked, groups = _question(request, ADMIN_GROUPS, (*_PARAMETERS, "tenant", "organisation"), "tenant")
    own = edge.callers.administered_by(principal)
    asked.organisation, asked.tenant = request.query.get("organisation", own or ""), request.query.get("tenant", "")
    is_own = asked.organisation == own and asked.tenant.partition("/")[0] in ("", own)
    if own is not None and not is_own:
        message = f"Your key administers {own} only."
        raise KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message)
    return await _answer(service, request, asked, groups, asked.tenant, "")


def _metered(edge: Edge, request: web.BaseRequest) -> tuple[Principal, TenantUsage]:
    principal = edge.callers.principal_of(request)
    if principal is None or edge.usage is None:
        raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, "This fabric has no tenants, and so keeps no usage.")
    return principal, edge.usage


def _question(
    request: web.BaseRequest, known: Mapping[str, pb.UsageGroup], parameters: Sequence[str], default: str
) -> tuple[pb.GetUsageRequest, list[str]]:
    """Returns the question for control, and by which of the `known` groups. Raises KvloomError (INVALID_ARGUMENT)."""
    query = request.query
    for name in query:
        if name not in parameters:
            raise invalid_argument(f"There is no parameter {name[:64]!r}.", name[:64])
    groups = [group for group in query.get("by", default).split(",") if group]
    for group in groups:
        if group not in known:
            raise invalid_argument(f"by cannot be {group[:64]!r}, only {', '.join(known)}.", "by")
    if query.get("format", "json") not in ("json", "csv"):
        raise invalid_argument("format must be json or csv.", "format")
    asked = pb.GetUsageRequest(
        first_day=_day(query.get("first_day", ""), "first_day"),
        last_day=_day(query.get("last_day", ""), "last_day"),
        group_by=[known[group] for group in groups],
    )
    return asked, groups


async def _answer(
    service: TenantUsage,
    request: web.BaseRequest,
    asked: pb.GetUsageRequest,
    groups: list[str],
    budgets_of: str,
    key_id: str,
    **more: str,
) -> web.StreamResponse:
    """`budgets_of`: the tenant whose budgets are shown; "": none are. `more`: further fields."""
    wants_csv = request.query.get("format") == "csv"
    async with service.service() as control:
        found = await control.GetUsage(asked, timeout=CALL_SECONDS)
        budgets = pb.GetBudgetsResponse()
        if budgets_of and not wants_csv:
            budget = pb.GetBudgetsRequest(tenant=budgets_of, key_id=key_id)
            budgets = await control.GetBudgets(budget, timeout=CALL_SECONDS)
    rows = [_row(row, groups) for row in found.rows]
    if wants_csv:
        return web.Response(text=_csv(rows, groups), content_type="text/csv", charset="utf-8")
    return json_response(
        {
            "object": "usage",
            **more,
            "data": rows,
            "has_more": found.is_truncated,
            "budgets": [_budget(one) for one in budgets.budgets],
        }
    )


def _day(text: str, name: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat() if text else ""
    except ValueError:
        raise invalid_argument(f"{name} is no day such as 2026-11-25.", name) from None


def _row(row: pb.UsageRow, groups: list[str]) -> dict[str, Any]:
    names = {
        "tenant": row.tenant,
        "day": row.day,
        "model": row.model,
        "key": row.key_id,
        "tier": row.tier,
        "class": row.priority_class,
    }
    return {
        **{group: names[group] for group in groups},
        "num_requests": row.num_requests,
        "num_prompt_tokens": row.num_prompt_tokens,
        "num_cached_tokens": row.num_cached_tokens,
        "num_output_tokens": row.num_output_tokens,
        "num_reasoning_tokens": row.num_reasoning_tokens,
        "block_seconds": round(row.block_seconds, 3),
        "cost": decimal(row.cost_nanos),
    }


def _budget(state: pb.BudgetState) -> dict[str, Any]:
    is_money = state.budget.unit == BUDGET_UNIT_NANOS

    def shown(amount: int) -> str | int:
        return decimal(amount) if is_money else amount

    return {
        "account": state.budget.account,
        "unit": "currency" if is_money else "tokens",
        "period": state.budget.period,
        "limit": shown(state.limit),
        "spent": shown(state.spent),
        "remaining": shown(max(0, state.limit - state.spent)),
    }


def _csv(rows: list[dict[str, Any]], groups: list[str]) -> str:
    columns = [column for column in COLUMNS if column not in ADMIN_GROUPS or column in groups]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
