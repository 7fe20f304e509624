"""The chunks of the files of vector stores as rows. Each function works within the caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from orchestrator.database.schema import store_chunks, store_files
from orchestrator.seal import seal_of
from orchestrator.store.vector_files import COMPLETED

_READ: Final = 500
"""Chunks of one query."""


class Chunk(NamedTuple):
    """A chunk of a file, and its vector as little-endian float32."""

    number: int
    text: str
    vector: bytes


class ChunkText(NamedTuple):
    """A chunk's file, and its text."""

    file: str
    text: str


async def append(
    connection: AsyncConnection, tenant: str, store: str, file: str, first: int, chunks: Sequence[tuple[str, bytes]]
) -> None:
    """Adds (text, vector) of a file, of which the first has this position."""
    seal = seal_of(connection)
    rows = [
        {
            "store": store,
            "file": file,
            "position": first + place,
            "text": seal.sealed_text(tenant, text),
            "vector": vector,
        }
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


async def of_file(connection: AsyncConnection, tenant: str, store: str, file: str) -> list[Chunk]:
    """All chunks of a file, in order."""
    own = sa.and_(store_chunks.c.store == store, store_chunks.c.file == file)
    columns = [store_chunks.c[name] for name in Chunk._fields]
    seal, found = seal_of(connection), list[Chunk]()
    while True:
        wanted = sa.select(*columns).where(own, store_chunks.c.position >= len(found))
        rows = (await connection.execute(wanted.order_by(store_chunks.c.position).limit(_READ))).all()
        found += [Chunk(row.number, seal.opened_text(tenant, row.text), row.vector) for row in rows]
        if len(rows) < _READ:
            return found


async def texts(connection: AsyncConnection, tenant: str, store: str, file: str) -> list[str]:
    """The texts of a file, in order."""
    own = sa.and_(store_chunks.c.store == store, store_chunks.c.file == file)
    rows = (await connection.scalars(sa.select(store_chunks.c.text).where(own).order_by("position"))).all()
    seal = seal_of(connection)
    return [seal.opened_text(tenant, text) for text in rows]


async def found(connection: AsyncConnection, tenant: str, store: str, numbers: Sequence[int]) -> dict[int, ChunkText]:
    """By number: the file and the text of those chunks that are still there."""
    columns = (store_chunks.c.number, store_chunks.c.file, store_chunks.c.text)
    wanted = sa.select(*columns).where(store_chunks.c.store == store, store_chunks.c.number.in_(numbers))
    seal = seal_of(connection)
    rows = await connection.execute(wanted)
    return {row.number: ChunkText(row.file, seal.opened_text(tenant, row.text)) for row in rows}
