"""How much of the directory an organisation may take: how many keys, projects and users, and how many bytes of entries,
which every edge and router keeps in memory.

Whatever a change has added is counted before it is committed. What is there already stays, also if it is more than a
quota that was lowered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import keys, memberships, organisations, projects, used_ids, users
from control.directory import names
from kvloom.errors import KvloomError
from kvloom.v1 import directory_service_pb2 as pb
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.tenancy.table import EXPIRED_SECONDS

MAX_QUOTA: Final = 2**31 - 1
ENTRY_BYTES: Final = 256
"""An entry counts as so many bytes beside the texts that were given for it."""
KEPT_TIMES: Final = 10
"""So many times the quota are kept of keys that have ended, and of ids of projects and users that were used."""
_TEXTS: Final = (
    *("name", "scopes", "models", "priority_classes", "default_priority_class", "limits", "cache_scope", "residency"),
    "guardrails",
)
_COUNTED: Final = {"key": "max_keys", "tenant": "max_projects", "user": "max_users"}


class Quotas(msgspec.Struct, frozen=True):
    """Those of an organisation that has none of its own. The operator gives a larger one larger quotas."""

    max_keys: int = 10_000
    """Keys that were revoked or have long expired do not count."""
    max_projects: int = 1_000
    max_users: int = 10_000
    max_entry_bytes: int = 16 * 2**20
    """The size of keys and projects together, which each edge and router keeps in memory: the texts that were given,
    and `ENTRY_BYTES` each."""


def stored(given: pb.Quotas) -> dict[str, int]:
    """The column of quotas that differ from the usual ones. Raises KvloomError (INVALID_ARGUMENT)."""
    found = {name: getattr(given, name) for name in Quotas.__struct_fields__}
    for name, value in found.items():
        names.integer(value, MAX_QUOTA, f"organisation.quotas.{name}")
    return {name: value for name, value in found.items() if value}


def shown(column: Mapping[str, int]) -> pb.Quotas:
    return pb.Quotas(**column)


async def check(
    connection: AsyncConnection, defaults: Quotas, changes: Iterable[Mapping[str, Any]], now: float
) -> None:
    """`changes` are rows for the audit. Raises KvloomError (BUDGET_EXHAUSTED) that names the quota, if the organisation
    of one has more of what the change has added than its quota. `now`: seconds since 1970."""
    added: dict[str, set[str]] = {}
    for change in changes:
        kind = change["target"].partition(":")[0]
        if change["after"] is None or kind not in ("org", *_COUNTED):
            continue
        of_user = change["after"].get("memberships", ()) if kind == "user" else ()
        for organisation in {change["organisation"], *of_user} - {""}:
            quotas = added.setdefault(organisation, set())
            if change["before"] is None and kind in _COUNTED:
                quotas.add(_COUNTED[kind])
            if _size(change["after"]) > _size(change["before"] or {}):
                quotas.add("max_entry_bytes")
    for organisation in sorted(added):
        await _check(connection, defaults, organisation, added[organisation], now)


def _size(row: Mapping[str, Any]) -> int:
    return sum(len(msgspec.json.encode(row[name])) for name in _TEXTS if name in row)


async def _check(connection: AsyncConnection, defaults: Quotas, organisation: str, which: set[str], now: float) -> None:
    own = await connection.scalar(sa.select(organisations.c.quotas).where(organisations.c.id == organisation))
    quotas = msgspec.structs.replace(defaults, **(own or {}))
    for name, count in (
        ("max_keys", _num_keys),
        ("max_projects", _num_projects),
        ("max_users", _num_users),
        ("max_entry_bytes", _num_bytes),
    ):
        quota = getattr(quotas, name)
        if name in which and (number := await count(connection, organisation, now)) > quota:
            raise exhausted(organisation, name, quota, number)
    if "max_keys" in which:
        await _forget_ended(connection, organisation, quotas.max_keys * KEPT_TIMES, now)
    for kind, name in (("tenant", "max_projects"), ("user", "max_users")):
        if name in which:
            used = sa.select(sa.func.count()).where(used_ids.c.organisation == organisation, used_ids.c.kind == kind)
            number, kept = (await connection.execute(used)).scalar_one(), getattr(quotas, name) * KEPT_TIMES
            if number > kept:
                raise exhausted(organisation, name, kept, number, ", with those that were deleted")


def exhausted(organisation: str, name: str, quota: int, number: int, which: str = "") -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_BUDGET_EXHAUSTED,
        f"The organisation {organisation!r} may have {quota} {name.removeprefix('max_').replace('_', ' ')}{which}, and "
        f"would have {number}. The operator may raise its quota {name}.",
        limit=f"org:{organisation} {name}",
    )


def _is_counted(now: float) -> sa.ColumnElement[bool]:
    """The keys that are in the table that edges and routers follow, or may be."""
    has_ended = sa.or_(keys.c.revoked_at.is_not(None), keys.c.expires_at < now - EXPIRED_SECONDS)
    return sa.or_(keys.c.digest.is_(None), sa.not_(sa.func.coalesce(has_ended, sa.false())))


def _of(organisation: str, column: Any) -> sa.Select[Any]:
    """A column of the keys of an organisation."""
    joined = keys.join(projects, projects.c.id == keys.c.project)
    return sa.select(column).select_from(joined).where(projects.c.organisation == organisation)


async def _num_keys(connection: AsyncConnection, organisation: str, now: float) -> int:
    query = _of(organisation, sa.func.count()).where(_is_counted(now))
    return int((await connection.execute(query)).scalar_one())


async def _num_projects(connection: AsyncConnection, organisation: str, _now: float) -> int:
    query = sa.select(sa.func.count()).where(projects.c.organisation == organisation)
    return int((await connection.execute(query)).scalar_one())


async def _num_users(connection: AsyncConnection, organisation: str, _now: float) -> int:
    """Its own, also without a role, and those of the fabric that have a role in it."""
    is_own = users.c.id.startswith(f"{organisation}/", autoescape=True)
    is_member = sa.exists().where(memberships.c.user == users.c.id, memberships.c.organisation == organisation)
    query = sa.select(sa.func.count()).select_from(users).where(sa.or_(is_own, is_member))
    return int((await connection.execute(query)).scalar_one())


async def _num_bytes(connection: AsyncConnection, organisation: str, now: float) -> int:
    is_sqlite = connection.dialect.name == "sqlite"
    of_keys = _of(organisation, _bytes(keys, is_sqlite=is_sqlite)).where(_is_counted(now))
    of_projects = sa.select(_bytes(projects, is_sqlite=is_sqlite)).where(projects.c.organisation == organisation)
    sums = [(await connection.execute(query)).scalar_one() for query in (of_keys, of_projects)]
    return sum(int(one or 0) for one in sums)


def _bytes(table: sa.Table, *, is_sqlite: bool) -> sa.ColumnElement[Any]:
    """The sum over rows of a table."""
    texts = [sa.cast(table.c[name], sa.Text) for name in _TEXTS if name in table.c]
    sizes = [
        sa.func.length(sa.cast(text, sa.LargeBinary)) if is_sqlite else sa.func.octet_length(text) for text in texts
    ]
    return sa.func.sum(sum(sizes, start=sa.literal(ENTRY_BYTES)))


async def _forget_ended(connection: AsyncConnection, organisation: str, kept: int, now: float) -> None:
    """Delete the keys that ended first, if there are more than so many. An identity stays: its entry ends it."""
    ended = _of(organisation, keys.c.id).where(sa.not_(_is_counted(now)))
    last = sa.func.coalesce(keys.c.revoked_at, keys.c.expires_at)
    first = ended.order_by(last.desc()).offset(kept).limit(kept)
    await connection.execute(sa.delete(keys).where(keys.c.id.in_(first)))
