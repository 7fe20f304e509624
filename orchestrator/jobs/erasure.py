"""Erases what is stored of a tenant, or of one of its users, and notes how much that was.

An object is a user's if it, or its metadata, has the user's `safety_identifier`. With it go what belongs to a
response, its conversation, and the files of a batch. What is stored after an erasure was asked for stays.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import KvloomError
from kvloom_common.database.database import Database
from orchestrator.database.schema import jobs
from orchestrator.database.schema import objects as table
from orchestrator.jobs.runner import Clock
from orchestrator.store import objects
from orchestrator.store.expiry import WITH_CONTENT
from orchestrator.store.objects import StoredObject, body_of, feedback_id, generation_id
from orchestrator.store.retention import KIND as RETENTION

if TYPE_CHECKING:
    from orchestrator.store.hot_items import HotItems

log = structlog.get_logger()

KIND: Final = "erasure"
"""That of the record, and of the job."""
MAX_ERASURES: Final = 2
"""That one process works at."""
PAGE: Final = 200
RETRY_SECONDS: Final = 0.5
_FOREVER: Final = 0.0
_KEPT: Final = (KIND, RETENTION)
_CONVERSATIONS: Final = ("conversation", "deleted_conversation")
_FILES: Final = ("input_file_id", "output_file_id", "error_file_id")

EraseExcerpts = Callable[[str, str | None], int]
"""Destroys the excerpts that this machine's audit log has of a tenant, or of its user, and returns how many keys they
had."""


def digest_of(user: str) -> str:
    """How a record names a user, whose name is erased, too."""
    return hashlib.sha256(user.encode("utf-8", "surrogateescape")).hexdigest()


class ErasureWork:
    """Work (orchestrator/jobs/runner.py). A page is one transaction, which also counts what it has deleted."""

    def __init__(
        self,
        database: Database,
        delete_content: Callable[[str], Awaitable[None]],
        erase_excerpts: EraseExcerpts,
        job: Any,
        clock: Clock,
        hot_items: HotItems | None = None,
    ) -> None:
        self._database = database
        self._delete_content = delete_content
        self._erase_excerpts = erase_excerpts
        self._job = job
        self._clock = clock
        self._hot_items = hot_items

    async def look(self, now: float) -> None:
        pass

    async def run(self) -> None:
        record = await self._database.uninterrupted(self._record())
        tenant, user = record.body["tenant"], record.body["user"]
        # A user's name is taken out of the record when the user's objects are gone, also if a process that died did it.
        if user is not None or record.body["safety_identifier_sha256"] is None:
            await self._erase_objects(record)
            num_keys = await asyncio.to_thread(self._erase_excerpts, tenant, user)
            await self._database.uninterrupted(self._change({"user": None}, Counter(audit_keys=num_keys)))
        while True:
            if await self._database.uninterrupted(self._database.forget_deleted()):
                break
            await asyncio.sleep(RETRY_SECONDS)  # a reader still sees what there was
        body = await self._database.uninterrupted(self._end())
        log.info("erasure_ended", erasure=record.id, tenant=tenant, num_objects=sum(body["counts"].values()))

    async def _erase_objects(self, record: StoredObject) -> None:
        after: str | None = ""
        while after is not None:
            after, found = await self._database.uninterrupted(self._page(record, after))
            for object_id, kind in found.items():
                if kind in WITH_CONTENT:
                    await self._delete_content(object_id)
            await self._database.uninterrupted(self._delete(found))
            if self._hot_items is not None:
                await self._hot_items.forget([name for name, kind in found.items() if kind in _CONVERSATIONS])

    async def _record(self) -> StoredObject:
        async with self._database.reading() as connection:
            return await objects.get(connection, self._job.tenant, KIND, self._job.id, _FOREVER)

    async def _page(self, record: StoredObject, after: str) -> tuple[str | None, dict[str, str]]:
        """The id behind which the next page begins, None after the last one, and the kinds of what is to be erased, by
        its ids."""
        tenant, user = record.body["tenant"], record.body["user"]
        is_own = sa.and_(table.c.tenant == tenant, table.c.kind.not_in(_KEPT), table.c.created_at <= record.created_at)
        wanted = sa.select(table.c.id, table.c.kind, table.c.body).where(is_own, table.c.id > after)
        async with self._database.reading() as connection:
            rows = (await connection.execute(wanted.order_by(table.c.id).limit(PAGE))).all()
            found: dict[str, str] = {}
            for row in rows:
                if user is None:
                    found[row.id] = row.kind
                elif _is_of(body := _body(connection, tenant, row), user):
                    found |= {row.id: row.kind, **await _belonging(connection, tenant, row.id, body)}
        return (rows[-1].id if len(rows) == PAGE else None), found

    async def _delete(self, found: Mapping[str, str]) -> None:
        async with self._database.writing() as connection:
            present = (await connection.scalars(sa.select(table.c.id).where(table.c.id.in_(found)))).all()
            await objects.delete(connection, present)
            await self._count(connection, {}, Counter(found[object_id] for object_id in present))

    async def _change(self, values: Mapping[str, Any], more: Counter[str]) -> None:
        async with self._database.writing() as connection:
            await self._count(connection, values, more)

    async def _count(
        self, connection: AsyncConnection, values: Mapping[str, Any], more: Counter[str]
    ) -> dict[str, Any]:
        record = await objects.get(connection, self._job.tenant, KIND, self._job.id, _FOREVER, for_update=True)
        counts = Counter(record.body["counts"]) + more
        body = {**record.body, **values, "counts": dict(sorted(counts.items()))}
        await objects.change(connection, self._job.tenant, record.id, body)
        return body

    async def _end(self) -> dict[str, Any]:
        async with self._database.writing() as connection:
            await connection.execute(jobs.delete().where(jobs.c.id == self._job.id))
            values = {"status": "completed", "completed_at": int(self._clock())}
            return await self._count(connection, values, Counter())


def _body(connection: AsyncConnection, tenant: str, row: Any) -> Mapping[str, Any]:
    """Nothing, if it was encrypted with a secret that is lost: it cannot be read any more."""
    try:
        return body_of(connection, tenant, row)
    except KvloomError:
        return {}


def _is_of(body: Mapping[str, Any], user: str) -> bool:
    metadata = body.get("metadata") or {}
    return user in (body.get("safety_identifier"), metadata.get("safety_identifier"))


async def _belonging(
    connection: AsyncConnection, tenant: str, object_id: str, body: Mapping[str, Any]
) -> dict[str, str]:
    """The kinds of what goes with an object, by its ids."""
    conversation = body.get("conversation") or {}
    ids = [
        feedback_id(object_id),
        generation_id(object_id),
        conversation.get("id"),
        *(body.get(name) for name in _FILES),
    ]
    wanted = sa.select(table.c.id, table.c.kind).where(table.c.tenant == tenant, table.c.id.in_([*filter(None, ids)]))
    return {row.id: row.kind for row in await connection.execute(wanted)}
