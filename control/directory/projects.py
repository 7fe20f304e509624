"""Projects: the tenants of the fabric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import keys, projects
from control.directory import account_limits, kv_shares, names, operator_settings, organisations, priority_classes
from control.directory.actor import Actor, already_exists, failed_precondition, not_found
from control.directory.pages import read_page
from control.directory.transaction import DirectoryChange, read_tiers
from control.directory.updates import known_tier, masked_values
from kvloom.errors import invalid_argument
from kvloom.v1 import directory_service_pb2 as pb


async def create(change: DirectoryChange, request: pb.CreateProjectRequest) -> pb.CreateProjectResponse:
    project = request.project
    names.project_id(project.id, "project.id")
    if change.actor.sees(names.organisation_of(project.id)) and await find(change.connection, project.id) is not None:
        raise already_exists("project", project.id)
    tiers = await change.tiers()
    columns = {
        "tier": known_tier(change.actor, project.tier, None, tiers),
        "limits": account_limits.stored(project.limits, "project.limits"),
        "cache_scope": _cache_scope(change.actor, project.cache_scope),
        "models": names.models(project.models, "project.models"),
        **priority_classes.stored(project, "project"),
        "disabled": project.disabled,
    }
    columns = operator_settings.settled(change.actor, operator_settings.NOTHING, columns, columns, "project")
    row = await insert(change, project.id, create_organisation=request.create_organisation, **columns)
    await _check_share(change, None, row)
    return pb.CreateProjectResponse(project=shown(row, tiers))


async def insert(change: DirectoryChange, project_id: str, *, create_organisation: bool, **columns: Any) -> Any:
    """Add a project that does not exist, with these columns. Returns its row. Raises KvloomError (NOT_FOUND, or
    FAILED_PRECONDITION if there was such a project)."""
    organisation = names.organisation_of(project_id)
    change.actor.require(organisation, "organisation", organisation)
    if await organisations.find(change.connection, organisation) is None:
        if not create_organisation:
            raise not_found("organisation", organisation)
        change.actor.require_operator("organisations")
        await organisations.insert(change, organisation)
    await change.require_unused("tenant", project_id)
    defaults = {"tier": None, "limits": {}, "cache_scope": "", "models": [], "disabled": False, "operator_set": {}}
    defaults |= priority_classes.NONE_GIVEN
    row = {"id": project_id, "organisation": organisation, "created_at": change.now, **defaults, **columns}
    await change.connection.execute(sa.insert(projects).values(row))
    change.touch("tenant", [project_id])
    change.record(f"tenant:{project_id}", organisation, None, row, action="CreateProject")
    return row


async def get(connection: AsyncConnection, actor: Actor, request: pb.GetProjectRequest) -> pb.GetProjectResponse:
    row = await require(connection, actor, request.id)
    return pb.GetProjectResponse(project=shown(row, await read_tiers(connection)))


async def list_(connection: AsyncConnection, actor: Actor, request: pb.ListProjectsRequest) -> pb.ListProjectsResponse:
    query = sa.select(projects)
    if organisation := actor.scope(request.organisation):
        query = query.where(projects.c.organisation == organisation)
    rows, token = await read_page(connection, query, projects.c.id, request)
    tiers = await read_tiers(connection)
    return pb.ListProjectsResponse(projects=[shown(row, tiers) for row in rows], next_page_token=token)


async def update(change: DirectoryChange, request: pb.UpdateProjectRequest) -> pb.UpdateProjectResponse:
    row = await require(change.connection, change.actor, request.project.id)
    tiers = await change.tiers()
    values = masked_values(
        request.update_mask,
        request.project,
        {
            "tier": lambda one: known_tier(change.actor, one.tier, row["tier"], tiers),
            "limits": lambda one: account_limits.stored(one.limits, "project.limits"),
            "cache_scope": lambda one: _cache_scope(change.actor, one.cache_scope),
            "models": lambda one: names.models(one.models, "project.models", row["models"]),
            "disabled": lambda one: one.disabled,
            **priority_classes.readers("project", row),
        },
        row,
    )
    values = operator_settings.settled(change.actor, row, values, request.update_mask.paths, "project")
    after = {**row, **values}
    priority_classes.check(after, "project")
    await change.connection.execute(sa.update(projects).where(projects.c.id == row["id"]).values(values))
    if "limits" in values or "tier" in values:
        await _check_share(change, row, after)
    change.touch("tenant", [row["id"]])
    change.record(f"tenant:{row['id']}", row["organisation"], row, after)
    return pb.UpdateProjectResponse(project=shown(after, tiers))


async def delete(change: DirectoryChange, request: pb.DeleteProjectRequest) -> pb.DeleteProjectResponse:
    row = await require(change.connection, change.actor, request.id)
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


async def find(connection: AsyncConnection, project_id: str) -> sa.RowMapping | None:
    query = sa.select(projects).where(projects.c.id == project_id)
    return (await connection.execute(query)).mappings().first()


async def require(connection: AsyncConnection, actor: Actor, project_id: str) -> sa.RowMapping:
    """Raises KvloomError (NOT_FOUND)."""
    actor.require(names.organisation_of(project_id), "project", project_id)
    row = await find(connection, project_id)
    if row is None:
        raise not_found("project", project_id)
    return row


async def _check_share(change: DirectoryChange, before: Mapping[Any, Any] | None, after: Mapping[Any, Any]) -> None:
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


def shown(row: Mapping[Any, Any], tiers: Mapping[str, Mapping[str, Any]]) -> pb.Project:
    return pb.Project(
        id=row["id"],
        tier=row["tier"] or "",
        limits=account_limits.shown(row["limits"]),
        cache_scope=row["cache_scope"],
        models=row["models"],
        priority_classes=row["priority_classes"],
        default_priority_class=row["default_priority_class"],
        disabled=row["disabled"],
        created_at=row["created_at"],
        effective_limits=account_limits.shown(
            account_limits.effective(row["tier"], row["limits"], tiers, row["operator_set"])
        ),
        operator_limits=account_limits.shown(operator_settings.limits_of(row["operator_set"])),
    )
