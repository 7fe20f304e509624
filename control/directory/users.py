"""Users and their roles in organisations. A user's keys may do no more than the role in the organisation of their
project, and end with it.

The operator of the fabric gives users their names, and may give one roles in several organisations. An administrator
adds users that are the own organisation's, ORGANISATION/NAME, and gives roles to these and to those who have one there
already, so that no organisation can take another one's users or their names. An administrator may change what concerns
the own organisation only, so also a user as such, as long as they are in no other one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import keys, memberships, projects, users
from control.directory import names, operator_settings, organisations
from control.directory.accounts import masked_values
from control.directory.actor import Actor, already_exists, failed_precondition, not_found
from control.directory.pages import read_page
from control.directory.transaction import DirectoryChange
from kvloom.errors import invalid_argument
from kvloom.v1 import directory_service_pb2 as pb


async def create(change: DirectoryChange, request: pb.CreateUserRequest) -> pb.CreateUserResponse:
    user = request.user
    organisation = names.organisation_of_user(names.user_id(user.id, "user.id"))
    if change.actor.organisation is not None and organisation != change.actor.organisation:
        raise invalid_argument(
            f"The users of this organisation are called '{change.actor.organisation}/...'.", "user.id"
        )
    if organisation:
        await _require_organisation(change, organisation)
    if await _find(change.connection, user.id) is not None:
        raise already_exists("user", user.id)
    await change.require_unused("user", user.id)
    if change.actor.organisation is not None and not user.memberships:
        raise failed_precondition("A user that an administrator of an organisation adds needs a role in it.")
    row = {
        "id": user.id,
        "name": names.display_name(user.name, "user.name"),
        **operator_settings.settled(
            change.actor, operator_settings.NOTHING, {"disabled": user.disabled}, ["disabled"], "user"
        ),
        "created_at": change.now,
    }
    await change.connection.execute(sa.insert(users).values(row))
    roles = {one.organisation: names.role(one.role, "user.memberships") for one in user.memberships}
    for one in roles:
        await _require_organisation(change, one)
        _require_home(user.id, one)
    if roles:
        rows = [{"organisation": one, "user": user.id, "role": role} for one, role in roles.items()]
        await change.connection.execute(sa.insert(memberships), rows)
    if len(roles) == 1:
        (organisation,) = roles
    change.record(f"user:{user.id}", organisation, None, {**row, "memberships": roles})
    return pb.CreateUserResponse(user=_shown(row, roles, change.actor))


async def get(connection: AsyncConnection, actor: Actor, request: pb.GetUserRequest) -> pb.GetUserResponse:
    return pb.GetUserResponse(user=await _read(connection, actor, request.id))


async def list_(connection: AsyncConnection, actor: Actor, request: pb.ListUsersRequest) -> pb.ListUsersResponse:
    query = sa.select(users)
    if organisation := actor.scope(request.organisation):
        members = sa.select(memberships.c.user).where(memberships.c.organisation == organisation)
        query = query.where(users.c.id.in_(members))
    rows, token = await read_page(connection, query, users.c.id, request)
    roles = await _roles(connection, [row["id"] for row in rows])
    return pb.ListUsersResponse(
        users=[_shown(row, roles.get(row["id"], {}), actor) for row in rows], next_page_token=token
    )


async def update(change: DirectoryChange, request: pb.UpdateUserRequest) -> pb.UpdateUserResponse:
    row = await _require_own(change, request.user.id)
    values = masked_values(
        request.update_mask,
        request.user,
        {"name": lambda one: names.display_name(one.name, "user.name"), "disabled": lambda one: one.disabled},
        row,
    )
    values = operator_settings.settled(change.actor, row, values, request.update_mask.paths, "user")
    await change.connection.execute(sa.update(users).where(users.c.id == row["id"]).values(values))
    change.touch("key", await _key_ids(change.connection, row["id"]))
    change.record(f"user:{row['id']}", change.actor.organisation or "", row, {**row, **values})
    return pb.UpdateUserResponse(user=await _read(change.connection, change.actor, row["id"]))


async def delete(change: DirectoryChange, request: pb.DeleteUserRequest) -> pb.DeleteUserResponse:
    row = await _require_own(change, request.id)
    if row[operator_settings.COLUMN]:
        change.actor.require_operator("a user whom the operator has disabled")
    revoked = await _revoke(change, await _key_ids(change.connection, request.id))
    await change.connection.execute(sa.delete(users).where(users.c.id == request.id))
    await change.retire("user", request.id, names.organisation_of_user(request.id))
    change.record(f"user:{request.id}", change.actor.organisation or "", {**row, "revoked_keys": revoked}, None)
    return pb.DeleteUserResponse()


async def set_membership(change: DirectoryChange, request: pb.SetMembershipRequest) -> pb.SetMembershipResponse:
    organisation = request.membership.organisation
    role = names.role(request.membership.role, "membership.role")
    await _require_organisation(change, organisation)
    before = (await _roles(change.connection, [request.user])).get(request.user, {}).get(organisation)
    is_own = change.actor.organisation in (None, names.organisation_of_user(request.user))
    if await _find(change.connection, request.user) is None or not (is_own or before is not None):
        raise not_found("user", request.user)
    _require_home(request.user, organisation)
    row = {"organisation": organisation, "user": request.user, "role": role}
    if before is None:
        await change.connection.execute(sa.insert(memberships).values(row))
    else:
        await change.connection.execute(sa.update(memberships).where(_is(request.user, organisation)).values(role=role))
    change.touch("key", await _key_ids(change.connection, request.user, organisation))
    previous = None if before is None else {**row, "role": before}
    change.record(f"user:{request.user}", organisation, previous, row)
    return pb.SetMembershipResponse(user=await _read(change.connection, change.actor, request.user))


async def delete_membership(
    change: DirectoryChange, request: pb.DeleteMembershipRequest
) -> pb.DeleteMembershipResponse:
    change.actor.require(request.organisation, "organisation", request.organisation)
    role = (await _roles(change.connection, [request.user])).get(request.user, {}).get(request.organisation)
    if role is None:
        raise not_found(f"member of {request.organisation!r}", request.user)
    revoked = await _revoke(change, await _key_ids(change.connection, request.user, request.organisation))
    user = await _read(change.connection, change.actor, request.user)
    await change.connection.execute(sa.delete(memberships).where(_is(request.user, request.organisation)))
    before = {"organisation": request.organisation, "role": role, "revoked_keys": revoked}
    change.record(f"user:{request.user}", request.organisation, before, None)
    remaining = [one for one in user.memberships if one.organisation != request.organisation]
    del user.memberships[:]
    user.memberships.extend(remaining)
    return pb.DeleteMembershipResponse(user=user)


async def role_in(connection: AsyncConnection, user: str, organisation: str) -> str | None:
    """None: the user is no member, or there is none."""
    return await connection.scalar(sa.select(memberships.c.role).where(_is(user, organisation)))


def _is(user: str, organisation: str) -> sa.ColumnElement[bool]:
    return sa.and_(memberships.c.user == user, memberships.c.organisation == organisation)


async def _key_ids(connection: AsyncConnection, user: str, organisation: str = "") -> Sequence[str]:
    """The keys of a user that are not revoked; with `organisation`, those there."""
    query = sa.select(keys.c.id).where(keys.c.user == user, keys.c.revoked_at.is_(None))
    if organisation:
        query = query.join(projects, projects.c.id == keys.c.project).where(projects.c.organisation == organisation)
    return list(await connection.scalars(query))


async def _revoke(change: DirectoryChange, key_ids: Sequence[str]) -> list[str]:
    await change.connection.execute(sa.update(keys).where(keys.c.id.in_(key_ids)).values(revoked_at=change.now))
    change.touch("key", key_ids)
    return list(key_ids)


async def _find(connection: AsyncConnection, user_id: str) -> sa.RowMapping | None:
    return (await connection.execute(sa.select(users).where(users.c.id == user_id))).mappings().first()


async def _roles(connection: AsyncConnection, user_ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """The roles of users, by user and organisation."""
    rows = await connection.execute(sa.select(memberships).where(memberships.c.user.in_(user_ids)))
    found: dict[str, dict[str, str]] = {}
    for organisation, user, role in rows:
        found.setdefault(user, {})[organisation] = role
    return found


async def _read(connection: AsyncConnection, actor: Actor, user_id: str) -> pb.User:
    """Raises KvloomError (NOT_FOUND), also if the user is none of the actor's organisation."""
    row = await _find(connection, user_id)
    roles = (await _roles(connection, [user_id])).get(user_id, {})
    if row is None or (actor.organisation is not None and actor.organisation not in roles):
        raise not_found("user", user_id)
    return _shown(row, roles, actor)


async def _require_own(change: DirectoryChange, user_id: str) -> sa.RowMapping:
    """A user whom the actor may change. Raises KvloomError."""
    await _read(change.connection, change.actor, user_id)
    roles = (await _roles(change.connection, [user_id])).get(user_id, {})
    if any(not change.actor.sees(organisation) for organisation in roles):
        change.actor.require_operator("a user who is in several organisations")
    row = await _find(change.connection, user_id)
    assert row is not None
    return row


def _require_home(user_id: str, organisation: str) -> None:
    """Raises KvloomError (FAILED_PRECONDITION) for a role of an organisation's own user in another one."""
    home = names.organisation_of_user(user_id)
    if home and home != organisation:
        raise failed_precondition(f"{user_id!r} can only have a role in {home!r}.")


async def _require_organisation(change: DirectoryChange, organisation: str) -> None:
    change.actor.require(organisation, "organisation", organisation)
    if await organisations.ORGANISATION.find(change.connection, organisation) is None:
        raise not_found("organisation", organisation)


def _shown(row: Mapping[Any, Any], roles: Mapping[str, str], actor: Actor) -> pb.User:
    return pb.User(
        id=row["id"],
        name=row["name"],
        disabled=row["disabled"],
        created_at=row["created_at"],
        memberships=[
            pb.Membership(organisation=organisation, role=role)
            for organisation, role in sorted(roles.items())
            if actor.sees(organisation)
        ],
    )
