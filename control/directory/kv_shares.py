"""The guaranteed shares of KV blocks, of which all accounts together may have a part only.

The operator gives them to organisations and to projects. An administrator may divide the share of the organisation
among its projects: what a project has of it so is the organisation's no longer, and all shares together stay the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import organisations, projects
from control.directory import operator_settings
from control.directory.account_limits import KV_SHARE
from control.directory.transaction import DirectoryChange
from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.kv_share import MAX_KV_SHARES_PERCENT

FIELD: Final = KV_SHARE
Tiers = Mapping[str, Mapping[str, Any]]
Row = Mapping[Any, Any]


async def check(change: DirectoryChange, before: Row | None, after: Row, field: str) -> None:
    """After a change of an organisation, a project or a tier by the operator, given its rows. Raises KvloomError
    (INVALID_ARGUMENT) if too much is guaranteed. What an organisation has divided, and has not any more, is divided no
    longer. Nothing is read if the row's share is the same as before."""
    tiers = await change.tiers()
    granted = _granted(after, tiers)
    shares = granted, after["limits"].get(FIELD)
    if shares == ((0, None) if before is None else (_granted(before, tiers), before["limits"].get(FIELD))):
        return
    total = await _total_percent(change.connection, tiers) if granted else 0
    if total > MAX_KV_SHARES_PERCENT:
        raise invalid_argument(
            f"All guaranteed shares of KV blocks would be {total}% together; at most {MAX_KV_SHARES_PERCENT}% can be.",
            f"{field}.{FIELD}",
        )
    for organisation, divided in (await _divided(change.connection, None, tiers)).items():
        if divided > await _share_of_organisation(change.connection, organisation, tiers):
            await _undivide(change, organisation)
        change.touch("organisation", [organisation])
    if "organisation" in after:
        change.touch("organisation", [after["organisation"]])


async def check_division(change: DirectoryChange, before: Row | None, after: Row) -> None:
    """After a change of a project by an administrator. Raises KvloomError: INVALID_ARGUMENT if the shares of the
    organisation's projects would be more than its own, and PERMISSION_DENIED if the operator has given the project a
    share."""
    field = f"project.limits.{FIELD}"
    wanted = after["limits"].get(FIELD)
    if wanted == (None if before is None else before["limits"].get(FIELD)):
        return
    tiers = await change.tiers()
    if _granted(after, tiers):
        message = "The operator of the fabric has given the project its share of KV blocks, and alone may change it."
        raise KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message, field=field)
    organisation = after["organisation"]
    divided = (await _divided(change.connection, (organisation,), tiers))[organisation]
    share = await _share_of_organisation(change.connection, organisation, tiers)
    if wanted and divided > share:
        raise invalid_argument(
            f"The shares of KV blocks of the organisation's projects would be {divided}% together; "
            f"the share that the operator of the fabric has given to the organisation is {share}%.",
            field,
        )
    change.touch("organisation", [organisation])


def refuse(limits: Mapping[str, Any], field: str) -> None:
    """Raises KvloomError (INVALID_ARGUMENT) if the limits of a key have a share."""
    if limits.get(FIELD):
        raise invalid_argument(
            "A key has no share of KV blocks of its own: give it to its project or organisation.", f"{field}.{FIELD}"
        )


async def remaining(
    connection: AsyncConnection, found: Iterable[tuple[str, str | None, Mapping[str, Any]]], tiers: Tiers
) -> dict[str, dict[str, int]]:
    """The share left to organisations (id, tier, stored limits) that have divided theirs, as a limit, by id."""
    shares = {one: share for one, tier, limits in found if (share := _share(tier, limits, tiers))}
    if not shares:
        return {}
    divided = await _divided(connection, shares, tiers)
    return {one: {FIELD: max(0, shares[one] - percent)} for one, percent in divided.items()}


async def _total_percent(connection: AsyncConnection, tiers: Tiers) -> int:
    with_share = [name for name, limits in tiers.items() if limits.get(FIELD)]
    total = 0
    for table, limits in ((organisations, organisations.c.limits), (projects, projects.c.operator_set["limits"])):
        has_share = sa.or_(limits[FIELD].as_integer() > 0, table.c.tier.in_(with_share))
        rows = await connection.execute(sa.select(table.c.tier, limits).where(has_share))
        total += sum(_share(tier, given or {}, tiers) for tier, given in rows)
    return total


async def _divided(connection: AsyncConnection, which: Collection[str] | None, tiers: Tiers) -> Counter[str]:
    """The percent that administrators have divided, by organisation. `which`: None: all of them."""
    query = sa.select(projects.c.organisation, projects.c.tier, projects.c.limits, projects.c.operator_set)
    query = query.where(projects.c.limits[FIELD].as_integer() > 0)
    if which is not None:
        query = query.where(projects.c.organisation.in_(which))
    found: Counter[str] = Counter()
    for organisation, tier, limits, operator_set in await connection.execute(query):
        if not _share(tier, operator_settings.limits_of(operator_set), tiers):
            found[organisation] += limits[FIELD]
    return found


async def _share_of_organisation(connection: AsyncConnection, organisation: str, tiers: Tiers) -> int:
    query = sa.select(organisations.c.tier, organisations.c.limits).where(organisations.c.id == organisation)
    tier, limits = (await connection.execute(query)).one()
    return _share(tier, limits, tiers)


async def _undivide(change: DirectoryChange, organisation: str) -> None:
    """Take what an organisation's administrators have given to its projects."""
    query = sa.select(projects.c.id, projects.c.limits, projects.c.operator_set)
    query = query.where(projects.c.organisation == organisation, projects.c.limits[FIELD].as_integer() > 0)
    for project, limits, operator_set in (await change.connection.execute(query)).all():
        if operator_settings.limits_of(operator_set).get(FIELD):
            continue
        others = {name: value for name, value in limits.items() if name != FIELD}
        await change.connection.execute(sa.update(projects).where(projects.c.id == project).values(limits=others))
        change.touch("tenant", [project])
        change.record(f"tenant:{project}", organisation, {"limits": limits}, {"limits": others})
    change.touch("organisation", [organisation])


def _granted(row: Row, tiers: Tiers) -> int:
    """The share that the operator has given to an organisation, a project or a tier, with the tier's."""
    limits = operator_settings.limits_of(row["operator_set"]) if "operator_set" in row else row["limits"]
    return _share(row.get("tier"), limits, tiers)


def _share(tier: str | None, limits: Mapping[str, Any], tiers: Tiers) -> int:
    share: int = limits.get(FIELD) or tiers.get(tier or "", {}).get(FIELD, 0)
    return share
