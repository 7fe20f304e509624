"""Tells the version of the table, and which entries have changed since another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import changes, table_state


class TableState(NamedTuple):
    table_id: str
    version: int
    oldest_version: int
    """Changes since this version are known."""


async def read_state(connection: AsyncConnection) -> TableState:
    columns = (table_state.c.table_id, table_state.c.version, table_state.c.oldest_version)
    return TableState(*(await connection.execute(sa.select(*columns))).one())


async def read_changes(connection: AsyncConnection, after: int, until: int) -> Mapping[str, set[str]]:
    """Returns the entries, by their kind, that have changed after one version until another one."""
    query = sa.select(changes.c.kind, changes.c.entry).where(changes.c.version > after, changes.c.version <= until)
    found: dict[str, set[str]] = {}
    for kind, entry in await connection.execute(query.distinct()):
        found.setdefault(kind, set()).add(entry)
    return found
