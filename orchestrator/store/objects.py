"""Objects as rows. Each function works within the caller's transaction."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from orchestrator.database.schema import batch_lines, deliveries, hot_keys, items, jobs, objects, response_events, runs
from orchestrator.seal import seal_of
from orchestrator.store import vector_files
from orchestrator.store.pages import Page, unknown_cursor

NAMES: Final[Mapping[str, str]] = {
    "response": "response",
    "conversation": "conversation",
    "deleted_conversation": "deleted conversation",
    "feedback": "feedback",
    "generation": "generation",
    "chat_completion": "chat completion",
    "file": "file",
    "batch": "batch",
    "vector_store": "vector store",
    "store_file": "file in this vector store",
    "file_batch": "file batch",
    "prompt": "prompt",
    "prompt_version": "version of the prompt",
    "upload": "upload",
    "upload_part": "upload part",
    "webhook_endpoint": "webhook endpoint",
    "retention": "retention",
    "erasure": "erasure",
}
"""The kinds of objects, and what errors call them."""


class StoredObject(NamedTuple):
    id: str
    created_at: float
    expires_at: float | None
    parent: str
    label: str
    body: dict[str, Any]


_COLUMNS: Final = [objects.c[name] for name in StoredObject._fields]


def new_id(prefix: str) -> str:
    """An id that cannot be guessed."""
    return f"{prefix}{os.urandom(24).hex()}"


def feedback_id(response_id: str) -> str:
    """The id of the feedback on a response."""
    return f"feedback.{response_id}"


def generation_id(response_id: str) -> str:
    """The id of what is needed to continue the output of a response."""
    return f"generation.{response_id}"


def as_json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def new_file(
    name: str,
    purpose: str,
    num_bytes: int,
    now: float,
    expires_at: float | None,
    file_id: str,
    mime_type: str = "",
) -> StoredObject:
    body = {"filename": name, "purpose": purpose, "bytes": num_bytes}
    if mime_type:
        body["mime_type"] = mime_type
    return StoredObject(file_id, now, expires_at, "", purpose, body)


async def add(
    connection: AsyncConnection,
    tenant: str,
    kind: str,
    one: StoredObject,
) -> bool:
    """Returns False if there is an object with this id already, which is then left as it is."""
    body = seal_of(connection).sealed(tenant, as_json(one.body))
    row = {**one._asdict(), "body": body, "tenant": tenant, "kind": kind}
    known = await connection.scalar(sa.select(objects.c.id).where(objects.c.id == one.id))
    if known is not None:
        return False
    await connection.execute(objects.insert().values(row))
    return True


def owned(tenant: str, kind: str, now: float) -> sa.ColumnElement[bool]:
    """The tenant's objects of a kind that have not expired."""
    is_alive = sa.or_(objects.c.expires_at.is_(None), objects.c.expires_at > now)
    return sa.and_(objects.c.tenant == tenant, objects.c.kind == kind, is_alive)


async def find(
    connection: AsyncConnection, tenant: str, kind: str, object_id: str, now: float, *, for_update: bool = False
) -> StoredObject | None:
    """None for an id that is unknown, another tenant's, or has expired. `for_update`: its row is locked until the end
    of the transaction."""
    wanted = sa.select(*_COLUMNS).where(objects.c.id == object_id, owned(tenant, kind, now))
    row = (await connection.execute(wanted.with_for_update() if for_update else wanted)).one_or_none()
    return None if row is None else _stored(connection, tenant, row)


async def get(
    connection: AsyncConnection,
    tenant: str,
    kind: str,
    object_id: str,
    now: float,
    field: str = "",
    *,
    for_update: bool = False,
) -> StoredObject:
    """Finds an object as `find` does. `field`: what names it. Raises KvloomError (NOT_FOUND)."""
    found = await find(connection, tenant, kind, object_id, now, for_update=for_update)
    if found is None:
        raise not_found(kind, object_id, field)
    return found


async def listed(
    connection: AsyncConnection, tenant: str, kind: str, page: Page, now: float, label: str = ""
) -> tuple[list[StoredObject], bool]:
    """A page of the tenant's objects of a kind, by their age, and True if there are more. Raises KvloomError
    (INVALID_ARGUMENT)."""
    wanted = sa.select(*_COLUMNS).where(owned(tenant, kind, now))
    if label:
        wanted = wanted.where(objects.c.label == label)
    key = sa.tuple_(objects.c.created_at, objects.c.id)
    if page.after:
        last = await find(connection, tenant, kind, page.after, now)
        if last is None:
            raise unknown_cursor()
        there = sa.tuple_(sa.literal(last.created_at), sa.literal(last.id))
        wanted = wanted.where(key < there if page.is_descending else key > there)
    order = [column.desc() if page.is_descending else column.asc() for column in (objects.c.created_at, objects.c.id)]
    rows = (await connection.execute(wanted.order_by(*order).limit(page.limit + 1))).all()
    return [_stored(connection, tenant, row) for row in rows[: page.limit]], len(rows) > page.limit


async def names_after(
    connection: AsyncConnection, tenant: str, kind: str, now: float, after: tuple[float, str], most: int
) -> list[tuple[float, str]]:
    """The times and ids of the tenant's next objects, by their age. `after` may be deleted meanwhile."""
    key, there = sa.tuple_(objects.c.created_at, objects.c.id), sa.tuple_(*map(sa.literal, after))
    wanted = sa.select(objects.c.created_at, objects.c.id).where(owned(tenant, kind, now), key > there)
    rows = await connection.execute(wanted.order_by(objects.c.created_at, objects.c.id).limit(most))
    return [(row.created_at, row.id) for row in rows]


async def change(
    connection: AsyncConnection, tenant: str, object_id: str, body: Mapping[str, Any], label: str | None = None
) -> None:
    """`label`: the new one; None: it stays."""
    sealed = seal_of(connection).sealed(tenant, as_json(body))
    values = {"body": sealed, **({} if label is None else {"label": label})}
    await connection.execute(objects.update().where(objects.c.id == object_id).values(values))


async def move(connection: AsyncConnection, object_id: str, kind: str, expires_at: float | None) -> None:
    """Makes an object one of another kind, as which it then is found."""
    values = {"kind": kind, "expires_at": expires_at}
    await connection.execute(objects.update().where(objects.c.id == object_id).values(values))


async def count(connection: AsyncConnection, tenant: str, kind: str, now: float, label: str = "") -> int:
    """How many objects of a kind the tenant has."""
    wanted = sa.select(sa.func.count()).where(owned(tenant, kind, now))
    return await connection.scalar(wanted.where(objects.c.label == label) if label else wanted) or 0


async def delete(connection: AsyncConnection, object_ids: Sequence[str]) -> None:
    """Deletes objects with their items, events, lines, deliveries, feedback and generation, vector stores with their
    chunks, and files from vector stores. Who works at one of them notices."""
    await vector_files.forget(connection, object_ids)
    waiting = sa.select(deliveries.c.id).where(deliveries.c.endpoint.in_(object_ids))
    await connection.execute(jobs.delete().where(jobs.c.id.in_(waiting)))
    await connection.execute(jobs.delete().where(jobs.c.id.in_(object_ids), jobs.c.kind == "batch"))
    parts = (runs.c.response, response_events.c.response, deliveries.c.endpoint, batch_lines.c.batch, items.c.parent)
    for column in (*parts, hot_keys.c.conversation):
        await connection.execute(column.table.delete().where(column.in_(object_ids)))
    told = [name(one) for one in object_ids for name in (feedback_id, generation_id)]
    await connection.execute(objects.delete().where(objects.c.id.in_([*object_ids, *told])))


def not_found(kind: str, object_id: str, field: str = "") -> KvloomError:
    """The same whether the id is unknown, another tenant's or has expired."""
    message = f"There is no {NAMES[kind]} {object_id[:128]!r}."
    return KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, message, field=field)


def body_of(connection: AsyncConnection, tenant: str, row: Any) -> dict[str, Any]:
    """Raises KvloomError (FAILED_PRECONDITION)."""
    return msgspec.json.decode(seal_of(connection).opened(tenant, row.body))


def _stored(connection: AsyncConnection, tenant: str, row: Any) -> StoredObject:
    fields: dict[str, Any] = {**row._mapping, "body": body_of(connection, tenant, row)}
    return StoredObject(**fields)
