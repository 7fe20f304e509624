"""The chunks of the files of vector stores as rows. Each function works within the caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from orchestrator.database.schema import store_chunks, store_files
from orchestrator.store.vector_files import COMPLETED

_READ: Final = 500
"""Chunks of one query."""


class Chunk(NamedTuple):
    """A chunk of a file, and its vector as little-endian float32."""

    number: int
    text: str
    vector: bytes


async def append(
    connection: AsyncConnection, store: str, file: str, first: int, chunks: Sequence[tuple[str, bytes]]
) -> None:
    """Adds (text, vector) of a file, of which the first has this position."""
    rows = [
        {"store": store, "file": file, "position": first + place, "text": text, "vector": vector}
        for place, (text, vector) in enumerate(chunks)
    ]
    if rows:
        await connection.execute(store_chunks.insert(), rows)


async def drop(connection: AsyncConnection, store: str, file: str) -> None:
    await connection.execute(store_chunks.delete().where(store_chunks.c.store == store, store_chunks.c.file == file))


async def completed(connection: AsyncConnection, store: str) -> dict[str, tuple[int, bytes]]:
    """By file that is completed: its version, and the JSON of its body."""
    wanted = sa.select(store_files.c.file, store_files.c.version, store_files.c.body).where(
        store_files.c.store == store, store_files.c.status == COMPLETED
    )
    return {row.file: (row.version, row.body) for row in await connection.execute(wanted)}


async def of_file(connection: AsyncConnection, store: str, file: str) -> list[Chunk]:
    """All chunks of a file, in order."""
    own = sa.and_(store_chunks.c.store == store, store_chunks.c.file == file)
    columns = [store_chunks.c[name] for name in Chunk._fields]
    found: list[Chunk] = []
    while True:
        wanted = sa.select(*columns).where(own, store_chunks.c.position >= len(found))
        rows = (await connection.execute(wanted.order_by(store_chunks.c.position).limit(_READ))).all()
        found += [Chunk(*row) for row in rows]
        if len(rows) < _READ:
            return found


async def texts(connection: AsyncConnection, store: str, file: str) -> list[str]:
    """The texts of a file, in order."""
    own = sa.and_(store_chunks.c.store == store, store_chunks.c.file == file)
    return list((await connection.scalars(sa.select(store_chunks.c.text).where(own).order_by("position"))).all())


async def found(connection: AsyncConnection, store: str, numbers: Sequence[int]) -> dict[int, Any]:
    """By number: the file and the text of those chunks that are still there."""
    columns = (store_chunks.c.number, store_chunks.c.file, store_chunks.c.text)
    wanted = sa.select(*columns).where(store_chunks.c.store == store, store_chunks.c.number.in_(numbers))
    return {row.number: row for row in await connection.execute(wanted)}
