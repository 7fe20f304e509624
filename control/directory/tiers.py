"""Tiers of limits. Only the operator of the fabric changes them."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import keys, limit_tiers, organisations, projects
from control.directory import account_limits, kv_shares, names
from control.directory.actor import Actor, failed_precondition, not_found
from control.directory.pages import read_page
from control.directory.transaction import MAX_CHANGES, DirectoryChange, Kind
from kvloom.v1 import directory_service_pb2 as pb

_HOLDERS: Final[tuple[tuple[Kind, sa.Table], ...]] = (
    ("organisation", organisations),
    ("tenant", projects),
    ("key", keys),
)
MAX_TIERS: Final = 1000


async def list_(connection: AsyncConnection, actor: Actor, request: pb.ListLimitTiersRequest) -> Any:  # noqa: ARG001
    rows, token = await read_page(connection, sa.select(limit_tiers), limit_tiers.c.name, request)
    tiers = [pb.LimitTier(name=row["name"], limits=account_limits.shown(row["limits"])) for row in rows]
    return pb.ListLimitTiersResponse(tiers=tiers, next_page_token=token)


async def set_(change: DirectoryChange, request: pb.SetLimitTierRequest) -> pb.SetLimitTierResponse:
    change.actor.require_operator("tiers of limits")
    name = names.tier_name(request.tier.name, "tier.name")
    row = {"name": name, "limits": account_limits.stored(request.tier.limits, "tier.limits")}
    tiers = await change.tiers()
    if name in tiers:
        await change.connection.execute(sa.update(limit_tiers).where(limit_tiers.c.name == name).values(row))
        for kind, table in _HOLDERS:
            # One more than are logged is as good as all of them.
            holders = sa.select(table.c.id).where(table.c.tier == name).limit(MAX_CHANGES + 1)
            change.touch(kind, await change.connection.scalars(holders))
    elif len(tiers) >= MAX_TIERS:
        raise failed_precondition(f"There are {MAX_TIERS} tiers already.")
    else:
        await change.connection.execute(sa.insert(limit_tiers).values(row))
    before = {"name": name, "limits": tiers[name]} if name in tiers else None
    await kv_shares.check(change, before, row, "tier.limits")
    change.record(f"tier:{name}", "", before, row)
    return pb.SetLimitTierResponse(tier=pb.LimitTier(name=name, limits=account_limits.shown(row["limits"])))


async def delete(change: DirectoryChange, request: pb.DeleteLimitTierRequest) -> pb.DeleteLimitTierResponse:
    change.actor.require_operator("tiers of limits")
    tiers = await change.tiers()
    if request.name not in tiers:
        raise not_found("tier of limits", request.name)
    for kind, table in _HOLDERS:
        holder = await change.connection.scalar(sa.select(table.c.id).where(table.c.tier == request.name).limit(1))
        if holder is not None:
            raise failed_precondition(
                f"The {kind} {holder!r} has the tier {request.name!r}: give it another one first."
            )
    await change.connection.execute(sa.delete(limit_tiers).where(limit_tiers.c.name == request.name))
    change.record(f"tier:{request.name}", "", {"name": request.name, "limits": tiers[request.name]}, None)
    return pb.DeleteLimitTierResponse()
