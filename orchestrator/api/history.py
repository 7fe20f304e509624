"""Conversations as users look for them: listed with titles, searched, deleted for a while, and restored. OpenAI's API
has none of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import invalid_argument
from orchestrator.api import conversations
from orchestrator.api.call import OperationCall, operation
from orchestrator.api.conversations import KIND
from orchestrator.database.schema import items as table
from orchestrator.seal import seal_of
from orchestrator.store import items, objects
from orchestrator.store.objects import StoredObject
from orchestrator.store.pages import Page, page_of

DELETED_KIND: Final = "deleted_conversation"
MAX_TITLE_CHARS: Final = 80
MAX_SEARCH_CHARS: Final = 256
MAX_SCANNED_ITEMS: Final = 20_000
"""Items that one search reads. It says from where the next one goes on."""
MAX_SNIPPETS: Final = 3
SNIPPET_CHARS: Final = 160
_BATCH: Final = 20
"""Conversations that are read at a time."""


async def entry(connection: AsyncConnection, tenant: str, one: StoredObject) -> dict[str, Any]:
    """A conversation with its title: the one that it was given, or the beginning of what was said first."""
    title = one.body["metadata"].get("title")
    if not title:
        first = sa.select(table.c.body).where(table.c.parent == one.id).order_by(table.c.position).limit(1)
        body = await connection.scalar(first)
        text = "" if body is None else items.text_of(msgspec.json.decode(seal_of(connection).opened(tenant, body)))
        title = " ".join(text.split())[:MAX_TITLE_CHARS]
    return {**conversations.shown(one), "title": title, "num_items": await items.count(connection, one.id)}


@operation("listConversations")
async def list_conversations(call: OperationCall) -> Any:
    page = page_of(call.query)
    kind = DELETED_KIND if call.query.get("deleted") == "true" else KIND
    if search := call.query.get("search", ""):
        return await _searched(call, kind, page, search)
    async with call.database.reading() as connection:
        found, has_more = await objects.listed(connection, call.tenant, kind, page, call.now)
        data = [await entry(connection, call.tenant, one) for one in found]
    return _as_list(data, found[-1].id if found else None, has_more=has_more)


async def _searched(call: OperationCall, kind: str, page: Page, search: str) -> Any:
    """The conversations that have an item with all words. `last_id` is the last one that was looked at."""
    words = search.casefold().split()
    if not words or len(search) > MAX_SEARCH_CHARS:
        raise invalid_argument(f"search must have words, and at most {MAX_SEARCH_CHARS} characters.", "search")
    data: list[dict[str, Any]] = []
    num_scanned, has_more = 0, True
    last: str | None = None
    while has_more and len(data) < page.limit and num_scanned < MAX_SCANNED_ITEMS:
        part = Page(last or page.after, _BATCH, page.is_descending)
        async with call.database.reading() as connection:
            found, has_more = await objects.listed(connection, call.tenant, kind, part, call.now)
            for place, one in enumerate(found):
                bodies = await items.of_parent(connection, call.tenant, one.id)
                num_scanned, last = num_scanned + len(bodies), one.id
                if snippets := await asyncio.to_thread(_snippets, bodies, words):
                    data.append({**await entry(connection, call.tenant, one), "snippets": snippets})
                if len(data) == page.limit or num_scanned >= MAX_SCANNED_ITEMS:
                    has_more = has_more or place + 1 < len(found)
                    break
    return _as_list(data, last, has_more=has_more)


def _snippets(bodies: Sequence[bytes], words: Sequence[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for body in bodies:
        item = msgspec.json.decode(body)
        text = items.text_of(item)
        folded = text.casefold()
        if all(word in folded for word in words):
            at = max(0, min(folded.index(word) for word in words) - SNIPPET_CHARS // 4)
            found.append({"item_id": item["id"], "text": " ".join(text[at : at + SNIPPET_CHARS].split())})
            if len(found) == MAX_SNIPPETS:
                break
    return found


def _as_list(data: Sequence[dict[str, Any]], last_id: str | None, *, has_more: bool) -> dict[str, Any]:
    """`last_id`: after it the next page begins."""
    first = data[0]["id"] if data else None
    return {"object": "list", "data": data, "first_id": first, "last_id": last_id, "has_more": has_more}


@operation("titleConversation")
async def set_title(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await objects.get(connection, call.tenant, KIND, call.ids[0], call.now, for_update=True)
        one = one._replace(body={**one.body, "metadata": {**one.body["metadata"], "title": call.body["title"]}})
        await objects.change(connection, call.tenant, one.id, one.body)
        return await entry(connection, call.tenant, one)


@operation("removeConversation")
async def remove(call: OperationCall) -> Any:
    """Deletes it for a while: nothing finds it any more but the list of those that are deleted."""
    purged_at = call.now + call.settings.deleted_days * 86_400
    async with call.database.writing() as connection:
        one = await objects.get(connection, call.tenant, KIND, call.ids[0], call.now, for_update=True)
        await objects.move(connection, one.id, DELETED_KIND, purged_at)
    deleted = {"id": one.id, "object": "conversation.deleted", "deleted": True}
    return {**deleted, "purged_at": int(purged_at)}


@operation("restoreConversation")
async def restore(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await objects.get(connection, call.tenant, DELETED_KIND, call.ids[0], call.now, for_update=True)
        await objects.move(connection, one.id, KIND, None)
        return await entry(connection, call.tenant, one)
