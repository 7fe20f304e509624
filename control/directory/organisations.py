"""Organisations. Only the operator of the fabric adds, changes and removes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import memberships, organisations, projects, users
from control.directory import account_limits, kv_shares, names, priority_classes, quotas
from control.directory.actor import Actor, already_exists, failed_precondition, not_found
from control.directory.pages import read_page
from control.directory.transaction import DirectoryChange, read_tiers
from control.directory.updates import known_tier, masked_values
from kvloom.v1 import directory_service_pb2 as pb


async def create(change: DirectoryChange, request: pb.CreateOrganisationRequest) -> pb.CreateOrganisationResponse:
    change.actor.require_operator("organisations")
    organisation = request.organisation
    names.organisation_id(organisation.id, "organisation.id")
    if await find(change.connection, organisation.id) is not None:
        raise already_exists("organisation", organisation.id)
    own_quotas = quotas.stored(organisation.quotas)
    tiers = await change.tiers()
    row = await insert(
        change,
        organisation.id,
        tier=known_tier(change.actor, organisation.tier, None, tiers),
        limits=account_limits.stored(organisation.limits, "organisation.limits"),
        disabled=organisation.disabled,
        classes=priority_classes.stored(organisation, "organisation"),
        own_quotas=own_quotas,
    )
    await kv_shares.check(change, None, row, "organisation.limits")
    return pb.CreateOrganisationResponse(organisation=shown(row, tiers))


async def insert(
    change: DirectoryChange,
    organisation_id: str,
    *,
    tier: str | None = None,
    limits: Mapping[str, Any] | None = None,
    disabled: bool = False,
    classes: Mapping[str, Any] = priority_classes.NONE_GIVEN,
    own_quotas: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Add an organisation that does not exist. Returns its row. Raises KvloomError (FAILED_PRECONDITION) if there was
    one."""
    await change.require_unused("organisation", organisation_id)
    row = {
        "id": organisation_id,
        "tier": tier,
        "limits": dict(limits or {}),
        **classes,
        "disabled": disabled,
        "created_at": change.now,
        "quotas": dict(own_quotas or {}),
    }
    await change.connection.execute(sa.insert(organisations).values(row))
    change.touch("organisation", [organisation_id])
    change.record(f"org:{organisation_id}", organisation_id, None, row, action="CreateOrganisation")
    return row


async def get(connection: AsyncConnection, actor: Actor, request: pb.GetOrganisationRequest) -> Any:
    row = await _require(connection, actor, request.id)
    return pb.GetOrganisationResponse(organisation=shown(row, await read_tiers(connection)))


async def list_(connection: AsyncConnection, actor: Actor, request: pb.ListOrganisationsRequest) -> Any:
    query = sa.select(organisations)
    if actor.organisation is not None:
        query = query.where(organisations.c.id == actor.organisation)
    rows, token = await read_page(connection, query, organisations.c.id, request)
    tiers = await read_tiers(connection)
    return pb.ListOrganisationsResponse(organisations=[shown(row, tiers) for row in rows], next_page_token=token)


async def update(change: DirectoryChange, request: pb.UpdateOrganisationRequest) -> pb.UpdateOrganisationResponse:
    change.actor.require_operator("organisations")
    row = await _require(change.connection, change.actor, request.organisation.id)
    tiers = await change.tiers()
    values = masked_values(
        request.update_mask,
        request.organisation,
        {
            "tier": lambda one: known_tier(change.actor, one.tier, row["tier"], tiers),
            "limits": lambda one: account_limits.stored(one.limits, "organisation.limits"),
            "disabled": lambda one: one.disabled,
            "quotas": lambda one: quotas.stored(one.quotas),
            **priority_classes.readers("organisation", row),
        },
        row,
    )
    after = {**row, **values}
    priority_classes.check(after, "organisation")
    await change.connection.execute(sa.update(organisations).where(organisations.c.id == row["id"]).values(values))
    if "limits" in values or "tier" in values:
        await kv_shares.check(change, row, after, "organisation.limits")
    change.touch("organisation", [row["id"]])
    change.record(f"org:{row['id']}", row["id"], row, after)
    return pb.UpdateOrganisationResponse(organisation=shown(after, tiers))


async def delete(change: DirectoryChange, request: pb.DeleteOrganisationRequest) -> pb.DeleteOrganisationResponse:
    change.actor.require_operator("organisations")
    row = await _require(change.connection, change.actor, request.id)
    has_projects = sa.select(projects.c.id).where(projects.c.organisation == request.id).limit(1)
    if (first := await change.connection.scalar(has_projects)) is not None:
        raise failed_precondition(f"The organisation {request.id!r} has projects, e.g. {first!r}: delete them first.")
    await change.connection.execute(sa.delete(memberships).where(memberships.c.organisation == request.id))
    await change.connection.execute(sa.delete(users).where(users.c.id.startswith(f"{request.id}/", autoescape=True)))
    await change.connection.execute(sa.delete(organisations).where(organisations.c.id == request.id))
    await change.retire("organisation", request.id, request.id)
    change.touch("organisation", [request.id])
    change.record(f"org:{request.id}", request.id, row, None)
    return pb.DeleteOrganisationResponse()


async def find(connection: AsyncConnection, organisation_id: str) -> sa.RowMapping | None:
    query = sa.select(organisations).where(organisations.c.id == organisation_id)
    return (await connection.execute(query)).mappings().first()


async def _require(connection: AsyncConnection, actor: Actor, organisation_id: str) -> sa.RowMapping:
    actor.require(organisation_id, "organisation", organisation_id)
    row = await find(connection, organisation_id)
    if row is None:
        raise not_found("organisation", organisation_id)
    return row


def shown(row: Mapping[Any, Any], tiers: Mapping[str, Mapping[str, Any]]) -> pb.Organisation:
    return pb.Organisation(
        id=row["id"],
        tier=row["tier"] or "",
        limits=account_limits.shown(row["limits"]),
        priority_classes=row["priority_classes"],
        default_priority_class=row["default_priority_class"],
        disabled=row["disabled"],
        created_at=row["created_at"],
        effective_limits=account_limits.shown(account_limits.effective(row["tier"], row["limits"], tiers)),
        quotas=quotas.shown(row["quotas"]),
    )
