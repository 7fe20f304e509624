"""Keys, and identities that have none (a subject of an OIDC issuer, or a certificate). A key is shown when it is made;
afterwards there is only its SHA-256."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import keys, projects
from control.directory import kv_shares, names, operator_settings, priority_classes, users
from control.directory import projects as all_projects
from control.directory.accounts import AccountKind, Row, masked_values
from control.directory.actor import Actor, already_exists, failed_precondition
from control.directory.transaction import DirectoryChange
from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1 import directory_service_pb2 as pb
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.access.api_keys import KEY_PREFIX, draw_key
from kvloom_common.tenancy.scopes import SCOPES_OF_ROLE
from kvloom_common.tenancy.table import identity_id

KEY: Final = AccountKind("key", keys, pb.ApiKey, lambda row: names.organisation_of(row["project"]))
_ID_BYTES: Final = 8
_SHOWN_CHARS: Final = len(KEY_PREFIX) + 4
MAX_GRACE_SECONDS: Final = 366 * 86_400.0
MAX_USES: Final = 10_000


async def create(change: DirectoryChange, request: pb.CreateKeyRequest) -> pb.CreateKeyResponse:
    key = request.key
    project = names.project_id(key.project, "key.project")
    if request.create_project and await all_projects.PROJECT.find(change.connection, project) is None:
        await all_projects.insert(change, project, create_organisation=True)
    try:
        await all_projects.PROJECT.require(change.connection, change.actor, project)
    except KvloomError as error:
        if error.reason != ErrorReason.ERROR_REASON_NOT_FOUND or request.create_project:
            raise
        message = f"{error.message} With create_project (--create) it is added, and its organisation."
        raise KvloomError(error.reason, message) from error
    before = operator_settings.NOTHING
    if key.id:
        key.id = identity_id(names.identity(key.id, "key.id"), project)
        before = await _make_room(change, key.id)
    scopes = names.scopes(key.scopes, "key.scopes")
    await _check_user(change.connection, key.user, project, scopes)
    tiers = await change.tiers()
    if not key.tier:
        key.tier = before.get("tier") or ""
    rights = {name: read(key) for name, read in _readers(change, {"tier": before.get("tier")}, tiers).items()}
    rights["scopes"] = scopes
    priority_classes.check(rights, "key")
    row: dict[str, Any] = {
        "id": key.id,
        "digest": None,
        "prefix": "",
        "project": project,
        "user": key.user or None,
        "operator_set": before[operator_settings.COLUMN],
        **operator_settings.settled(change.actor, before, rights, rights, "key"),
        "created_at": change.now,
        "last_used_at": None,
        "revoked_at": None,
        "account": "",
    }
    kv_shares.refuse(row["limits"], "key.limits")
    secret = "" if key.id else _give_secret(row)
    await change.connection.execute(sa.insert(keys).values(row))
    change.touch("key", [row["id"]])
    change.record(f"key:{row['id']}", names.organisation_of(project), None, row)
    return pb.CreateKeyResponse(key=KEY.shown(row, tiers), secret=secret)


async def list_(connection: AsyncConnection, actor: Actor, request: pb.ListKeysRequest) -> Any:
    query = sa.select(keys)
    if request.project:
        actor.require(names.organisation_of(request.project), "project", request.project)
        query = query.where(keys.c.project == request.project)
    if organisation := actor.scope(request.organisation):
        query = query.join(projects, projects.c.id == keys.c.project).where(projects.c.organisation == organisation)
    if not request.show_revoked:
        query = query.where(keys.c.revoked_at.is_(None))
    return await KEY.page(connection, query, request)


async def update(change: DirectoryChange, request: pb.UpdateKeyRequest) -> pb.UpdateKeyResponse:
    row = await _require_active(change, request.key.id)
    tiers = await change.tiers()
    readers = _readers(change, row, tiers)
    values = masked_values(request.update_mask, request.key, readers, row)
    values = operator_settings.settled(change.actor, row, values, request.update_mask.paths, "key")
    priority_classes.check({**row, **values}, "key")
    kv_shares.refuse(values.get("limits", {}), "key.limits")
    if "scopes" in values:
        await _check_user(change.connection, row["user"] or "", row["project"], values["scopes"])
    after = await _set(change, row, values)
    if limits := {name: values[name] for name in ("tier", "limits") if name in values}:
        for other in await _of_account(change.connection, row):
            await _set(change, other, {**limits, **operator_settings.with_limits_of(after, other)})
    return pb.UpdateKeyResponse(key=KEY.shown(after, tiers))


async def rotate(change: DirectoryChange, request: pb.RotateKeyRequest) -> pb.RotateKeyResponse:
    old = await _require_active(change, request.id)
    if old["digest"] is None:
        raise failed_precondition(f"{request.id!r} is an identity, which has no key to be replaced.")
    grace_seconds = names.time(request.grace_seconds, "grace_seconds")
    if grace_seconds > MAX_GRACE_SECONDS:
        raise invalid_argument(f"grace_seconds must be at most {MAX_GRACE_SECONDS:g}.", "grace_seconds")
    row: dict[str, Any] = dict(old)  # pyrefly: ignore[bad-assignment]
    row |= {"created_at": change.now, "last_used_at": None, "account": old["account"] or old["id"]}
    secret = _give_secret(row)
    await change.connection.execute(sa.insert(keys).values(row))
    change.touch("key", [row["id"]])
    change.record(f"key:{row['id']}", names.organisation_of(row["project"]), None, row)
    ends_at = min(change.now + grace_seconds, old["expires_at"] or names.MAX_TIME)
    await _set(change, old, {"expires_at": ends_at} if grace_seconds else {"revoked_at": change.now})
    return pb.RotateKeyResponse(key=KEY.shown(row, await change.tiers()), secret=secret)


async def revoke(change: DirectoryChange, request: pb.RevokeKeyRequest) -> pb.RevokeKeyResponse:
    """A key that is revoked already stays as it is. An identity that the operator revokes only the operator adds
    again."""
    row = await KEY.require(change.connection, change.actor, request.id)
    ended = {operator_settings.REVOKED: True}
    by_operator = operator_settings.settled(change.actor, row, ended, ended, "key") if row["digest"] is None else {}
    values = {name: by_operator[name] for name in by_operator if name == operator_settings.COLUMN}
    if row["revoked_at"] is None:
        values["revoked_at"] = change.now
    if any(row[name] != value for name, value in values.items()):
        row = await _set(change, row, values)
    return pb.RevokeKeyResponse(key=KEY.shown(row, await change.tiers()))


async def report_uses(connection: AsyncConnection, uses: Iterable[tuple[str, float]], now: float) -> None:
    """Note when keys were last used. Raises KvloomError (INVALID_ARGUMENT)."""
    latest: dict[str, float] = {}
    for key_id, at in uses:
        latest[key_id] = max(latest.get(key_id, 0.0), min(names.time(at, "uses"), now))
    if not latest:
        return
    is_later = sa.or_(keys.c.last_used_at.is_(None), keys.c.last_used_at < sa.bindparam("used_at"))
    note = sa.update(keys).where(keys.c.id == sa.bindparam("used"), is_later)
    # In one order, so that two processes do not wait for each other's rows.
    rows = [{"used": key_id, "used_at": at} for key_id, at in sorted(latest.items())]
    await connection.execute(note.values(last_used_at=sa.bindparam("used_at")), rows)


def _give_secret(row: dict[str, Any]) -> str:
    """Make a key for this row, and return it."""
    secret = draw_key()
    row["id"] = secrets.token_hex(_ID_BYTES)
    row["digest"] = hashlib.sha256(secret.encode()).digest()
    row["prefix"] = secret[:_SHOWN_CHARS]
    return secret


async def _make_room(change: DirectoryChange, identity: str) -> Mapping[Any, Any]:
    """One that was revoked may be added again, except by an administrator if the operator has revoked it; what the
    operator has set of it stays. Returns what there was. Raises KvloomError (ALREADY_EXISTS, PERMISSION_DENIED)."""
    row = await KEY.find(change.connection, identity)
    if row is None:
        return operator_settings.NOTHING
    if row["revoked_at"] is None:
        raise already_exists("identity", identity)
    if row[operator_settings.COLUMN].get(operator_settings.REVOKED):
        change.actor.require_operator("an identity that the operator has revoked")
    await change.connection.execute(sa.delete(keys).where(keys.c.id == identity))
    return row if change.actor.organisation is not None else operator_settings.NOTHING


async def _set(change: DirectoryChange, row: Mapping[Any, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Change a key. Returns its row."""
    await change.connection.execute(sa.update(keys).where(keys.c.id == row["id"]).values(**values))
    after = {**row, **values}
    change.touch("key", [row["id"]])
    change.record(f"key:{row['id']}", names.organisation_of(row["project"]), row, after)
    return after


async def _of_account(connection: AsyncConnection, row: Mapping[Any, Any]) -> Sequence[sa.RowMapping]:
    """The other keys that share the account of limits of a key and are not revoked."""
    account = row["account"] or row["id"]
    shares = sa.or_(keys.c.account == account, keys.c.id == account)
    query = sa.select(keys).where(shares, keys.c.id != row["id"], keys.c.revoked_at.is_(None))
    return (await connection.execute(query)).mappings().all()


def _readers(change: DirectoryChange, before: Row, tiers: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Any]]:
    """See AccountKind.readers."""
    return {
        **KEY.readers(change, before, tiers),
        "name": lambda one: names.display_name(one.name, "key.name"),
        "scopes": lambda one: names.scopes(one.scopes, "key.scopes", before.get("scopes", ())),
        "models": lambda one: names.models(one.models, "key.models", before.get("models", ())),
        "expires_at": lambda one: _expiry(one.expires_at, change.now),
    }


async def _require_active(change: DirectoryChange, key_id: str) -> sa.RowMapping:
    row = await KEY.require(change.connection, change.actor, key_id)
    if row["revoked_at"] is not None:
        raise failed_precondition(f"The key {key_id!r} is revoked.")
    return row


async def _check_user(connection: AsyncConnection, user: str, project: str, scopes: Sequence[str]) -> None:
    """Raises KvloomError if a key of this user cannot have these scopes there."""
    if not user:
        return
    organisation = names.organisation_of(project)
    role = await users.role_in(connection, user, organisation)
    if role is None:
        raise failed_precondition(f"The user {user[:128]!r} has no role in the organisation {organisation!r}.")
    allowed = SCOPES_OF_ROLE[names.role(role, "key.user")]
    if more := [scope for scope in scopes if scope not in allowed]:
        raise failed_precondition(f"The user {user!r} is {role} of {organisation!r}, which excludes {', '.join(more)}.")


def _expiry(expires_at: float, now: float) -> float | None:
    if 0.0 < names.time(expires_at, "key.expires_at") <= now:
        raise invalid_argument("The time at which the key expires has passed.", "key.expires_at")
    return expires_at or None
