"""Stored objects as lines of JSON, page by page: no process has more than a page in memory."""

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
from orchestrator.store.pages import Page

PAGE: Final = 50
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
    """The lines, of a page at a time; the oldest objects first. Raises KvloomError, and what a database raises."""
    kind, line = EXPORTS[operation]
    after, has_more = "", True
    while has_more:
        lines, after, has_more = await call.database.uninterrupted(_page(call, kind, line, after))
        yield lines


async def _page(call: OperationCall, kind: str, line: Line, after: str) -> tuple[bytes, str, bool]:
    async with call.database.reading() as connection:
        if call.ids:
            found, has_more = [await objects.get(connection, call.tenant, kind, call.ids[0], call.now)], False
        else:
            page = Page(after, PAGE, is_descending=False)
            found, has_more = await objects.listed(connection, call.tenant, kind, page, call.now)
        made = [await line(connection, call, one) for one in found]
    lines = b"".join(as_json(one) + b"\n" for one in made if one is not None)
    return lines, found[-1].id if found else "", has_more


def _raw(bodies: list[bytes]) -> list[msgspec.Raw]:
    return [msgspec.Raw(body) for body in bodies]
