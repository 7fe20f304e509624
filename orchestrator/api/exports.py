"""Stored objects as lines of JSON, one by one: no process has more than one in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import invalid_argument
from orchestrator.api import conversations, feedback, history
from orchestrator.api.call import OperationCall
from orchestrator.store import items, objects
from orchestrator.store.objects import StoredObject, as_json, feedback_id

PAGE: Final = 50
PIECE_BYTES: Final = 256 * 2**10
"""The most of a message to an edge."""
Line = Callable[[AsyncConnection, OperationCall, StoredObject], Awaitable[dict[str, Any] | None]]
"""Makes the line of an object; None: it is left out."""
_RESPONSE: Final = "response"


async def _conversation(connection: AsyncConnection, call: OperationCall, one: StoredObject) -> dict[str, Any]:
    entry = await history.entry(connection, call.tenant, one)
    return {"conversation": entry, "items": _raw(await items.of_parent(connection, call.tenant, one.id))}


async def _response(connection: AsyncConnection, call: OperationCall, one: StoredObject) -> dict[str, Any] | None:
    given = await objects.find(connection, call.tenant, feedback.KIND, feedback_id(one.id), call.now)
    wanted = call.query.get("feedback", "")
    if wanted and (given is None or wanted not in ("any", given.label)):
        return None
    output = await items.of_parent(connection, call.tenant, one.id, is_output=True)
    return {
        "response": {**one.body, "output": _raw(output)},
        "input": _raw(await items.of_parent(connection, call.tenant, one.id, is_output=False)),
        "feedback": None if given is None else feedback.shown(given),
    }


EXPORTS: Final[dict[str, tuple[str, Line]]] = {
    "exportConversation": (conversations.KIND, _conversation),
    "exportConversations": (conversations.KIND, _conversation),
    "exportResponses": (_RESPONSE, _response),
}
"""By the ids of their operations: the kind of the objects, and how their lines are made."""


async def check(call: OperationCall, operation: str) -> None:
    """Raises KvloomError (NOT_FOUND, INVALID_ARGUMENT)."""
    kind, _ = EXPORTS[operation]
    if call.query.get("feedback", "") not in ("", "any", *feedback.RATINGS):
        raise invalid_argument(f"feedback must be any, {' or '.join(feedback.RATINGS)}.", "feedback")
    if call.ids:
        async with call.database.reading() as connection:
            await objects.get(connection, call.tenant, kind, call.ids[0], call.now)


async def export(call: OperationCall, operation: str) -> AsyncIterator[bytes]:
    """The lines in pieces; the oldest objects first. Raises KvloomError, and what a database raises."""
    kind, line = EXPORTS[operation]
    after: tuple[float, str] = (0.0, "")
    while found := [(0.0, call.ids[0])] if call.ids else await call.database.uninterrupted(_page(call, kind, after)):
        for _, object_id in found:
            whole = await call.database.uninterrupted(_line(call, kind, line, object_id))
            for start in range(0, len(whole), PIECE_BYTES):
                yield whole[start : start + PIECE_BYTES]
        if call.ids:
            return
        after = found[-1]


async def _page(call: OperationCall, kind: str, after: tuple[float, str]) -> list[tuple[float, str]]:
    async with call.database.reading() as connection:
        return await objects.names_after(connection, call.tenant, kind, call.now, after, PAGE)


async def _line(call: OperationCall, kind: str, line: Line, object_id: str) -> bytes:
    """Nothing, if the object is left out, or was deleted meanwhile."""
    async with call.database.reading() as connection:
        one = await objects.find(connection, call.tenant, kind, object_id, call.now)
        made = None if one is None else await line(connection, call, one)
    return b"" if made is None else as_json(made) + b"\n"


def _raw(bodies: list[bytes]) -> list[msgspec.Raw]:
    return [msgspec.Raw(body) for body in bodies]
