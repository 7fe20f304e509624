"""A transaction that changes the directory: with its audit entries, and the next version of the table if what processes
replicate has changed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final, Literal

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import audit, changes, limit_tiers, table_state, used_ids
from control.directory import quotas
from control.directory.actor import Actor, failed_precondition
from kvloom_common.database.database import Database

Kind = Literal["organisation", "tenant", "key", "prices"]
IdKind = Literal["organisation", "tenant", "user"]

VERSIONS_CHANNEL: Final = "kvloom_table"
"""On which PostgreSQL tells all control services each version of the table."""
MAX_CHANGES: Final = 10_000
"""In one version. Beyond that nothing is logged, and all followers get the whole table."""
MAX_LOGGED_VERSIONS: Final = 10_000
_PRUNE_EVERY: Final = 256
"""Versions between two prunings of the log."""
_SECRET_COLUMNS: Final = ("digest",)


class DirectoryChange:
    """A transaction of one actor. Directory changes take turns, also those of several processes."""

    def __init__(
        self, connection: AsyncConnection, actor: Actor, action: str, now: float, defaults: quotas.Quotas
    ) -> None:
        self.connection = connection
        self.actor = actor
        self.now = now
        """Seconds since 1970."""
        self._action = action
        self._quotas = defaults
        self._touched: set[tuple[Kind, str]] = set()
        self._audited: list[dict[str, Any]] = []

    def touch(self, kind: Kind, entries: Iterable[str] = ("",)) -> None:
        """These entries of the replicated table have changed."""
        self._touched.update((kind, entry) for entry in entries)

    def record(
        self,
        target: str,
        organisation: str,
        before: Mapping[Any, Any] | None,
        after: Mapping[Any, Any] | None,
        action: str = "",
    ) -> None:
        """For the audit. `before` and `after` are rows; None: there is none. `action`: if it is not that of the whole
        transaction."""
        self._audited.append(
            {
                "at": self.now,
                "actor": self.actor.name,
                "action": action or self._action,
                "target": target,
                "organisation": organisation,
                "before": _without_secrets(before),
                "after": _without_secrets(after),
            }
        )

    async def tiers(self) -> dict[str, dict[str, Any]]:
        return await read_tiers(self.connection)

    async def require_unused(self, kind: IdKind, name: str) -> None:
        """Raises KvloomError (FAILED_PRECONDITION) for the id of something that was deleted: usage, audit and caches
        would take what has it for the old one."""
        found = sa.select(used_ids.c.id).where(used_ids.c.kind == kind, used_ids.c.id == name)
        if await self.connection.scalar(found) is not None:
            what = "project" if kind == "tenant" else kind
            raise failed_precondition(f"The {what} {name!r} was deleted. Ids are never used again: take another one.")

    async def retire(self, kind: IdKind, name: str, organisation: str) -> None:
        """Note that this id was used: what had it is deleted. `organisation`: whose it was; "": no single one's."""
        row = {"kind": kind, "id": name, "organisation": organisation}
        await self.connection.execute(sa.insert(used_ids).values(row))

    async def finish(self) -> None:
        """Write what was noted. Part of the transaction. Raises KvloomError for what is above a quota."""
        await quotas.check(self.connection, self._quotas, self._audited, self.now)
        if self._audited:
            await self.connection.execute(sa.insert(audit), self._audited)
        if self._touched:
            await self._next_version()

    async def _next_version(self) -> None:
        next_version = sa.update(table_state).values(version=table_state.c.version + 1).returning(table_state.c.version)
        version: int = (await self.connection.execute(next_version)).scalar_one()
        if self.connection.dialect.name == "postgresql":
            # It is delivered when the transaction is committed.
            await self.connection.execute(sa.select(sa.func.pg_notify(VERSIONS_CHANNEL, str(version))))
        if len(self._touched) > MAX_CHANGES:
            await self._forget_until(version)
            return
        rows = [{"version": version, "kind": kind, "entry": entry} for kind, entry in sorted(self._touched)]
        await self.connection.execute(sa.insert(changes), rows)
        if version % _PRUNE_EVERY == 0:
            await self._forget_until(version - MAX_LOGGED_VERSIONS)

    async def _forget_until(self, version: int) -> None:
        await self.connection.execute(sa.delete(changes).where(changes.c.version <= version))
        await self.connection.execute(
            sa.update(table_state).where(table_state.c.oldest_version < version).values(oldest_version=version)
        )


@contextlib.asynccontextmanager
async def changing(
    database: Database, actor: Actor, action: str, now: float, defaults: quotas.Quotas
) -> AsyncIterator[DirectoryChange]:
    """Nothing is changed if the context ends with an exception. `defaults`: the quotas of an organisation that has none
    of its own."""
    async with database.writing() as connection:
        await connection.execute(sa.select(table_state.c.id).with_for_update())
        change = DirectoryChange(connection, actor, action, now, defaults)
        yield change
        await change.finish()


async def read_tiers(connection: AsyncConnection) -> dict[str, dict[str, Any]]:
    """The stored limits of all tiers, by name."""
    rows = await connection.execute(sa.select(limit_tiers.c.name, limit_tiers.c.limits))
    return {name: limits for name, limits in rows}  # noqa: C416  (rows are no pairs for the type checker)


def _without_secrets(row: Mapping[Any, Any] | None) -> dict[str, Any] | None:
    return None if row is None else {str(name): row[name] for name in row if str(name) not in _SECRET_COLUMNS}
