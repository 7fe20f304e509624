"""The rows of a background response. Each function is one transaction, and a repetition changes nothing."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import KvloomError
from kvloom_common.database.database import Database
from orchestrator.database.schema import jobs, response_events, runs
from orchestrator.seal import seal_of
from orchestrator.store import items, objects
from orchestrator.webhooks import outbox

KIND: Final = "response"
"""That of the object, and of the job."""
OPEN: Final = ("queued", "in_progress")
_FOREVER: Final = 0.0
_EVENT_END: Final = b"\n\n"


class RunInputs(NamedTuple):
    """The inputs of a response; `response`: as it is now, without its output."""

    body: bytes
    seed: int
    priority_class: str
    conversation: str
    num_sent: int
    sent_digest: bytes
    response: dict[str, Any]


async def status(database: Database, tenant: str, response_id: str) -> str:
    """Returns the empty string if there is no such response any more."""
    async with database.reading() as connection:
        one = await objects.find(connection, tenant, KIND, response_id, _FOREVER)
        return "" if one is None else one.body["status"]


async def start(database: Database, tenant: str, response_id: str) -> RunInputs | None:
    """Returns None if there is nothing to generate any more: the job is over then."""
    async with database.writing() as connection:
        one = await objects.find(connection, tenant, KIND, response_id, _FOREVER, for_update=True)
        row = (await connection.execute(sa.select(runs).where(runs.c.response == response_id))).one_or_none()
        if one is None or row is None or one.body["status"] not in OPEN:
            await _end(connection, response_id)
            return None
        body = {**one.body, "status": "in_progress"}
        if body != one.body:
            await objects.change(connection, tenant, response_id, body)
        run = RunInputs(*row[1:], response=body)
        return run._replace(body=seal_of(connection).opened(tenant, run.body))


async def save_sent(database: Database, holder: str, response_id: str, num_sent: int, digest: bytes) -> bool:
    """Notes that so many events may be sent from now on. Returns False if another one works at the response."""
    is_held = sa.exists().where(jobs.c.id == response_id, jobs.c.holder == holder)
    wanted = runs.update().where(runs.c.response == response_id, runs.c.num_sent <= num_sent, is_held)
    async with database.writing() as connection:
        done = await connection.execute(wanted.values(num_sent=num_sent, sent_digest=digest))
        return done.rowcount == 1


async def finish(
    database: Database,
    tenant: str,
    holder: str,
    run: RunInputs,
    response: dict[str, Any],
    events: Sequence[bytes],
    now: float,
) -> bool:
    """Stores how a response has ended: with its output, its items in its conversation, its events, and the webhooks
    that tell of it, all or nothing. Returns False if it was cancelled or deleted, or another one works at it."""
    body, response_id = dict(response), response["id"]
    output = body.pop("output")
    async with database.writing() as connection:
        one = await objects.find(connection, tenant, KIND, response_id, _FOREVER, for_update=True)
        if one is None or one.body["status"] not in OPEN or not await _is_held(connection, holder, response_id):
            return False
        await objects.change(connection, tenant, response_id, body)
        await items.append(connection, tenant, response_id, output, num_output=len(output))
        if run.conversation and body["status"] != "failed":
            await _append_to_conversation(connection, tenant, run.conversation, response_id, len(output))
        await _keep_events(connection, tenant, response_id, events)
        await outbox.announce(connection, tenant, f"response.{body['status']}", response_id, now)
        await _end(connection, response_id)
    return True


async def end(database: Database, tenant: str, holder: str, response_id: str, events: Sequence[bytes]) -> None:
    """Ends the work at a response that was cancelled or deleted, if `holder` still does it. `events`: those that may
    have been sent."""
    async with database.writing() as connection:
        one = await objects.find(connection, tenant, KIND, response_id, _FOREVER, for_update=True)
        if not await _is_held(connection, holder, response_id):
            return
        if one is not None:
            await _keep_events(connection, tenant, response_id, events)
        await _end(connection, response_id)


async def read_events(connection: AsyncConnection, tenant: str, response_id: str) -> list[bytes] | None:
    """Returns None as long as the response runs."""
    wanted = sa.select(response_events.c.body).where(response_events.c.response == response_id)
    body = await connection.scalar(wanted)
    if body is None:
        return None
    return zlib.decompress(seal_of(connection).opened(tenant, body)).split(_EVENT_END)[:-1]


async def _keep_events(connection: AsyncConnection, tenant: str, response_id: str, events: Sequence[bytes]) -> None:
    known = sa.select(response_events.c.response).where(response_events.c.response == response_id)
    if await connection.scalar(known) is None:
        body = zlib.compress(b"".join(event + _EVENT_END for event in events), 1)
        sealed = seal_of(connection).sealed(tenant, body)
        await connection.execute(response_events.insert().values(response=response_id, body=sealed))


async def _append_to_conversation(
    connection: AsyncConnection, tenant: str, conversation: str, response_id: str, num_output: int
) -> None:
    """A conversation that was deleted meanwhile gets nothing."""
    with contextlib.suppress(KvloomError):
        await objects.get(connection, tenant, "conversation", conversation, _FOREVER, for_update=True)
        new = [msgspec.json.decode(body) for body in await items.of_parent(connection, tenant, response_id)]
        await items.append(connection, tenant, conversation, new, num_output=num_output)


async def _is_held(connection: AsyncConnection, holder: str, response_id: str) -> bool:
    own = sa.select(jobs.c.id).where(jobs.c.id == response_id, jobs.c.holder == holder)
    return await connection.scalar(own) is not None


async def _end(connection: AsyncConnection, response_id: str) -> None:
    await connection.execute(runs.delete().where(runs.c.response == response_id))
    await connection.execute(jobs.delete().where(jobs.c.id == response_id))
