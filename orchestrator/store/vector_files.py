"""The files of vector stores as rows. Each function works within the caller's transaction, which has found the store
before. A store's revision rises with each change that a search has to know of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from orchestrator.database.schema import jobs, store_chunks, store_files, vector_stores
from orchestrator.store.pages import Page, unknown_cursor

JOB_KIND: Final = "store_file"
"""That of the jobs, one for each file that is in progress."""
IN_PROGRESS: Final = "in_progress"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
STATUSES: Final = (IN_PROGRESS, COMPLETED, FAILED, CANCELLED)


class VectorFile(NamedTuple):
    """A file of a vector store. `body`: its name, its attributes, how it is cut, and why it failed."""

    store: str
    file: str
    created_at: float
    batch: str
    status: str
    usage_bytes: int
    version: int
    body: dict[str, Any]


_COLUMNS: Final = [store_files.c[name] for name in VectorFile._fields]


def job_of(store: str, file: str) -> str:
    """The id of the job that indexes a file."""
    return f"{store}/{file}"


def store_and_file(job_id: str) -> tuple[str, str]:
    store, _, file = job_id.partition("/")
    return store, file


async def begin_store(connection: AsyncConnection, store: str, now: float) -> None:
    await connection.execute(vector_stores.insert().values(store=store, revision=0, active_at=now))


async def state_of(connection: AsyncConnection, store: str) -> tuple[int, float]:
    """A store's revision, and when it was used last; (-1, 0) if it was deleted."""
    wanted = sa.select(vector_stores.c.revision, vector_stores.c.active_at).where(vector_stores.c.store == store)
    row = (await connection.execute(wanted)).one_or_none()
    return (-1, 0.0) if row is None else (row[0], row[1])


async def note_use(connection: AsyncConnection, store: str, now: float) -> None:
    await connection.execute(vector_stores.update().where(vector_stores.c.store == store).values(active_at=now))


async def next_revision(connection: AsyncConnection, store: str) -> int:
    own = vector_stores.c.store == store
    await connection.execute(vector_stores.update().where(own).values(revision=vector_stores.c.revision + 1))
    return await connection.scalar(sa.select(vector_stores.c.revision).where(own)) or 0


async def put(connection: AsyncConnection, tenant: str, key_id: str, store: str, files: Sequence[VectorFile]) -> None:
    """Adds files that are to be indexed. One that the store has is indexed anew."""
    await remove(connection, store, [file.file for file in files])
    rows = [{**file._asdict(), "tenant": tenant, "body": msgspec.json.encode(file.body)} for file in files]
    if not rows:
        return
    await connection.execute(store_files.insert(), rows)
    work = [
        {
            "id": job_of(store, file.file),
            "tenant": tenant,
            "key_id": key_id,
            "created_at": file.created_at,
            "kind": JOB_KIND,
            "holder": "",
            "held_until": 0.0,
        }
        for file in files
    ]
    await connection.execute(jobs.insert(), work)


async def find(connection: AsyncConnection, store: str, file: str) -> VectorFile | None:
    wanted = sa.select(*_COLUMNS).where(store_files.c.store == store, store_files.c.file == file)
    row = (await connection.execute(wanted)).one_or_none()
    return None if row is None else _file(row)


async def count(connection: AsyncConnection, store: str) -> int:
    return await connection.scalar(sa.select(sa.func.count()).where(store_files.c.store == store)) or 0


async def listed(
    connection: AsyncConnection, store: str, page: Page, before: str = "", status: str = "", batch: str = ""
) -> tuple[list[VectorFile], bool]:
    """A page of a store's files, by their age, and True if there are more. `before`: the file that the page ends in
    front of. Raises KvloomError (INVALID_ARGUMENT)."""
    wanted = sa.select(*_COLUMNS).where(store_files.c.store == store)
    if status:
        wanted = wanted.where(store_files.c.status == status)
    if batch:
        wanted = wanted.where(store_files.c.batch == batch)
    key, descends = sa.tuple_(store_files.c.created_at, store_files.c.file), page.is_descending
    for cursor, is_before in ((page.after, False), (before, True)):
        if cursor:
            last = await find(connection, store, cursor)
            if last is None:
                raise unknown_cursor("before" if is_before else "after")
            there = sa.tuple_(sa.literal(last.created_at), sa.literal(last.file))
            wanted = wanted.where(key < there if descends != is_before else key > there)
    is_backwards = bool(before) and not page.after
    columns = (store_files.c.created_at, store_files.c.file)
    order = [column.desc() if descends != is_backwards else column.asc() for column in columns]
    rows = (await connection.execute(wanted.order_by(*order).limit(page.limit + 1))).all()
    found = [_file(row) for row in rows[: page.limit]]
    return found[::-1] if is_backwards else found, len(rows) > page.limit


async def counts(connection: AsyncConnection, stores: Collection[str], batch: str = "") -> dict[str, dict[str, int]]:
    """By store: how many files it has in each status, and their bytes (`bytes`). `batch`: only those of one."""
    numbers = (sa.func.count(), sa.func.sum(store_files.c.usage_bytes))
    wanted = sa.select(store_files.c.store, store_files.c.status, *numbers).where(store_files.c.store.in_(stores))
    if batch:
        wanted = wanted.where(store_files.c.batch == batch)
    found = {store: {**dict.fromkeys(STATUSES, 0), "bytes": 0} for store in stores}
    for store, status, number, num_bytes in await connection.execute(
        wanted.group_by(store_files.c.store, store_files.c.status)
    ):
        found[store][status] = number
        found[store]["bytes"] += int(num_bytes)
    return found


async def change(connection: AsyncConnection, store: str, file: str, body: Mapping[str, Any], **columns: Any) -> None:
    own = sa.and_(store_files.c.store == store, store_files.c.file == file)
    await connection.execute(store_files.update().where(own).values(body=msgspec.json.encode(body), **columns))


async def cancel(connection: AsyncConnection, store: str, batch: str) -> None:
    """Cancels the files of a batch that are in progress. Who works at one of them notices."""
    own = sa.and_(store_files.c.store == store, store_files.c.batch == batch, store_files.c.status == IN_PROGRESS)
    found = (await connection.scalars(sa.select(store_files.c.file).where(own))).all()
    await connection.execute(store_files.update().where(own).values(status=CANCELLED))
    await _drop(connection, store, found)


async def remove(connection: AsyncConnection, store: str, files: Sequence[str]) -> None:
    """Takes files out of a store, with their chunks and jobs, as far as it has them."""
    own = sa.and_(store_files.c.store == store, store_files.c.file.in_(files))
    known = (await connection.scalars(sa.select(store_files.c.file).where(own))).all()
    if known:
        await _drop(connection, store, known)
        await connection.execute(store_files.delete().where(own))
        await next_revision(connection, store)


async def forget(connection: AsyncConnection, object_ids: Sequence[str]) -> None:
    """Deletes what vector stores have of these objects, which may be stores or files."""
    for is_own in (store_files.c.store.in_(object_ids), store_files.c.file.in_(object_ids)):
        places = (await connection.execute(sa.select(store_files.c.store, store_files.c.file).where(is_own))).all()
        for store in dict.fromkeys(place.store for place in places):
            await remove(connection, store, [place.file for place in places if place.store == store])
    await connection.execute(vector_stores.delete().where(vector_stores.c.store.in_(object_ids)))


async def _drop(connection: AsyncConnection, store: str, files: Sequence[str]) -> None:
    """Deletes the chunks and the jobs of files."""
    own = sa.and_(store_chunks.c.store == store, store_chunks.c.file.in_(files))
    await connection.execute(store_chunks.delete().where(own))
    await connection.execute(jobs.delete().where(jobs.c.id.in_([job_of(store, file) for file in files])))


def _file(row: Any) -> VectorFile:
    return VectorFile(**{**row._mapping, "body": msgspec.json.decode(row.body)})
