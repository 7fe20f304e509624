"""Organisations. Only the operator of the fabric adds, changes and removes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import memberships, organisations, projects, users
from control.directory import kv_shares, names, priority_classes, quotas
from control.directory.accounts import AccountKind, Row, masked_values
from control.directory.actor import Actor, already_exists, failed_precondition
from control.directory.transaction import DirectoryChange
from kvloom.v1 import directory_service_pb2 as pb

ORGANISATION: Final = AccountKind("organisation", organisations, pb.Organisation, lambda row: row["id"])


async def create(change: DirectoryChange, request: pb.CreateOrganisationRequest) -> pb.CreateOrganisationResponse:
    change.actor.require_operator("organisations")
    organisation = request.organisation
    names.organisation_id(organisation.id, "organisation.id")
    if await ORGANISATION.find(change.connection, organisation.id) is not None:
        raise already_exists("organisation", organisation.id)
    tiers = await change.tiers()
    columns = {name: read(organisation) for name, read in _readers(change, {}, tiers).items()}
    priority_classes.check(columns, "organisation")
    row = await insert(change, organisation.id, **columns)
    await kv_shares.check(change, None, row, "organisation.limits")
    return pb.CreateOrganisationResponse(organisation=ORGANISATION.shown(row, tiers))


async def insert(change: DirectoryChange, organisation_id: str, **columns: Any) -> dict[str, Any]:
    """Add an organisation that does not exist, with these columns. Returns its row. Raises KvloomError
    (FAILED_PRECONDITION) if there was one."""
    await change.require_unused("organisation", organisation_id)
    defaults = {"tier": None, "limits": {}, **priority_classes.NONE_GIVEN, "disabled": False, "quotas": {}}
    defaults["residency"] = []
    row = {"id": organisation_id, **defaults, "created_at": change.now, **columns}
    await change.connection.execute(sa.insert(organisations).values(row))
    change.touch("organisation", [organisation_id])
    change.record(f"org:{organisation_id}", organisation_id, None, row, action="CreateOrganisation")
    return row


async def list_(connection: AsyncConnection, actor: Actor, request: pb.ListOrganisationsRequest) -> Any:
    query = sa.select(organisations)
    if actor.organisation is not None:
        query = query.where(organisations.c.id == actor.organisation)
    return await ORGANISATION.page(connection, query, request)


async def update(change: DirectoryChange, request: pb.UpdateOrganisationRequest) -> pb.UpdateOrganisationResponse:
    change.actor.require_operator("organisations")
    row = await ORGANISATION.require(change.connection, change.actor, request.organisation.id)
    tiers = await change.tiers()
    readers = _readers(change, row, tiers)
    values = masked_values(request.update_mask, request.organisation, readers, row)
    after = {**row, **values}
    priority_classes.check(after, "organisation")
    await change.connection.execute(sa.update(organisations).where(organisations.c.id == row["id"]).values(values))
    if "limits" in values or "tier" in values:
        await kv_shares.check(change, row, after, "organisation.limits")
    change.touch("organisation", [row["id"]])
    change.record(f"org:{row['id']}", row["id"], row, after)
    return pb.UpdateOrganisationResponse(organisation=ORGANISATION.shown(after, tiers))


async def delete(change: DirectoryChange, request: pb.DeleteOrganisationRequest) -> pb.DeleteOrganisationResponse:
    change.actor.require_operator("organisations")
    row = await ORGANISATION.require(change.connection, change.actor, request.id)
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


def _readers(change: DirectoryChange, before: Row, tiers: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Any]]:
    """See AccountKind.readers."""
    return {
        **ORGANISATION.readers(change, before, tiers),
        "residency": lambda one: names.residency(one.residency, "organisation.residency", before.get("residency", ())),
        "disabled": lambda one: one.disabled,
        "quotas": lambda one: quotas.stored(one.quotas),
    }
