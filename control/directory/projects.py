"""Projects: the tenants of the fabric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import keys, projects
from control.directory import kv_shares, names, operator_settings, organisations, priority_classes
from control.directory.accounts import AccountKind, Row, masked_values
from control.directory.actor import Actor, already_exists, failed_precondition, not_found
from control.directory.transaction import DirectoryChange
from kvloom.errors import invalid_argument
from kvloom.v1 import directory_service_pb2 as pb

PROJECT: Final = AccountKind("project", projects, pb.Project, lambda row: row["organisation"])


async def create(change: DirectoryChange, request: pb.CreateProjectRequest) -> pb.CreateProjectResponse:
    project = request.project
    names.project_id(project.id, "project.id")
    if (
        change.actor.sees(names.organisation_of(project.id))
        and await PROJECT.find(change.connection, project.id) is not None
    ):
        raise already_exists("project", project.id)
    tiers = await change.tiers()
    columns = {name: read(project) for name, read in _readers(change, {}, tiers).items()}
    priority_classes.check(columns, "project")
    columns = operator_settings.settled(change.actor, operator_settings.NOTHING, columns, columns, "project")
    row = await insert(change, project.id, create_organisation=request.create_organisation, **columns)
    await _check_share(change, None, row)
    return pb.CreateProjectResponse(project=PROJECT.shown(row, tiers))


async def insert(change: DirectoryChange, project_id: str, *, create_organisation: bool, **columns: Any) -> Any:
    """Add a project that does not exist, with these columns. Returns its row. Raises KvloomError (NOT_FOUND, or
    FAILED_PRECONDITION if there was such a project)."""
    organisation = names.organisation_of(project_id)
    change.actor.require(organisation, "organisation", organisation)
    if await organisations.ORGANISATION.find(change.connection, organisation) is None:
        if not create_organisation:
            raise not_found("organisation", organisation)
        change.actor.require_operator("organisations")
        await organisations.insert(change, organisation)
    await change.require_unused("tenant", project_id)
    defaults = {"tier": None, "limits": {}, "cache_scope": "", "models": [], "disabled": False, "operator_set": {}}
    defaults |= {"residency": [], "guardrails": [], **priority_classes.NONE_GIVEN}
    row = {"id": project_id, "organisation": organisation, "created_at": change.now, **defaults, **columns}
    await change.connection.execute(sa.insert(projects).values(row))
    change.touch("tenant", [project_id])
    change.record(f"tenant:{project_id}", organisation, None, row, action="CreateProject")
    return row


async def list_(connection: AsyncConnection, actor: Actor, request: pb.ListProjectsRequest) -> Any:
    query = sa.select(projects)
    if organisation := actor.scope(request.organisation):
        query = query.where(projects.c.organisation == organisation)
    return await PROJECT.page(connection, query, request)


async def update(change: DirectoryChange, request: pb.UpdateProjectRequest) -> pb.UpdateProjectResponse:
    row = await PROJECT.require(change.connection, change.actor, request.project.id)
    tiers = await change.tiers()
    readers = _readers(change, row, tiers)
    values = masked_values(request.update_mask, request.project, readers, row)
    values = operator_settings.settled(change.actor, row, values, request.update_mask.paths, "project")
    after = {**row, **values}
    priority_classes.check(after, "project")
    await change.connection.execute(sa.update(projects).where(projects.c.id == row["id"]).values(values))
    if "limits" in values or "tier" in values:
        await _check_share(change, row, after)
    change.touch("tenant", [row["id"]])
    change.record(f"tenant:{row['id']}", row["organisation"], row, after)
    return pb.UpdateProjectResponse(project=PROJECT.shown(after, tiers))


async def delete(change: DirectoryChange, request: pb.DeleteProjectRequest) -> pb.DeleteProjectResponse:
    row = await PROJECT.require(change.connection, change.actor, request.id)
    of_project = keys.c.project == request.id
    removed = list(await change.connection.scalars(sa.select(keys.c.id).where(of_project)))
    await change.connection.execute(sa.delete(keys).where(of_project))
    await change.connection.execute(sa.delete(projects).where(projects.c.id == request.id))
    await change.retire("tenant", request.id, row["organisation"])
    change.touch("key", removed)
    change.touch("tenant", [request.id])
    change.touch("organisation", [row["organisation"]])  # which has what the project had of its KV share
    change.record(f"tenant:{request.id}", row["organisation"], {**row, "num_keys": len(removed)}, None)
    return pb.DeleteProjectResponse()


def _readers(change: DirectoryChange, before: Row, tiers: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Any]]:
    """See AccountKind.readers."""
    return {
        **PROJECT.readers(change, before, tiers),
        "cache_scope": lambda one: _cache_scope(change.actor, one.cache_scope),
        "models": lambda one: names.models(one.models, "project.models", before.get("models", ())),
        "residency": lambda one: names.residency(one.residency, "project.residency", before.get("residency", ())),
        "guardrails": lambda one: names.guardrails(one.guardrails, "project.guardrails"),
        "disabled": lambda one: one.disabled,
    }


async def _check_share(change: DirectoryChange, before: Row | None, after: Row) -> None:
    """Raises KvloomError."""
    if change.actor.organisation is None:
        await kv_shares.check(change, before, after, "project.limits")
    else:
        await kv_shares.check_division(change, before, after)


def _cache_scope(actor: Actor, cache_scope: str) -> str:
    """An administrator may only let projects of the own organisation share, whose name the scope has then."""
    if not cache_scope:
        return ""
    if len(cache_scope) > names.MAX_NAME_CHARS or not cache_scope.isprintable():
        raise invalid_argument("A cache scope has at most 128 printable characters.", "project.cache_scope")
    organisation = actor.organisation
    if organisation is not None and cache_scope != organisation and not cache_scope.startswith(f"{organisation}/"):
        raise failed_precondition(
            f"The cache scopes of this organisation are {organisation!r} and '{organisation}/...'."
        )
    return cache_scope
