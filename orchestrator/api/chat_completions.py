"""Stored chat completions: how they are kept, listed, changed and deleted."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvloom.v1.orchestrator_service_pb2 import KeepResponseRequest
from orchestrator.api.call import OperationCall, operation
from orchestrator.store import items, objects
from orchestrator.store.objects import StoredObject
from orchestrator.store.pages import as_list, page_of

KIND: Final = "chat_completion"
_METADATA: Final = "metadata["


async def keep(call: OperationCall, request: KeepResponseRequest, completion: dict[str, Any]) -> None:
    """Stores a completion with the messages that it was given."""
    one = StoredObject(completion["id"], call.now, call.expires_at, "", completion["model"], completion)
    given = [msgspec.json.decode(raw) for raw in request.input_items]
    messages = [{**message, "id": f"{one.id}-{number}"} for number, message in enumerate(given)]
    async with call.database.writing() as connection:
        if await objects.add(connection, call.tenant, KIND, one):
            await items.append(connection, call.tenant, one.id, messages)


@operation("listChatCompletions")
async def list_completions(call: OperationCall) -> Any:
    page = page_of(call.query, order="asc")
    wanted = {name[len(_METADATA) : -1]: text for name, text in call.query.items() if name.startswith(_METADATA)}
    found: list[StoredObject] = []
    async with call.database.reading() as connection:
        while True:
            some, has_more = await objects.listed(
                connection, call.tenant, KIND, page, call.now, call.query.get("model", "")
            )
            found += [one for one in some if wanted.items() <= (one.body.get("metadata") or {}).items()]
            if not has_more or len(found) > page.limit:
                break
            page = page._replace(after=some[-1].id)
    has_more = has_more or len(found) > page.limit
    return as_list([one.body for one in found[: page.limit]], has_more=has_more)


@operation("getChatCompletion")
async def get(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        return (await objects.get(connection, call.tenant, KIND, call.ids[0], call.now)).body


@operation("updateChatCompletion")
async def update(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await objects.get(connection, call.tenant, KIND, call.ids[0], call.now, for_update=True)
        body = {**one.body, "metadata": call.body.get("metadata") or {}}
        await objects.change(connection, call.tenant, one.id, body)
    return body


@operation("deleteChatCompletion")
async def delete(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await objects.get(connection, call.tenant, KIND, call.ids[0], call.now)
        await objects.delete(connection, [one.id])
    return {"id": one.id, "object": "chat.completion.deleted", "deleted": True}


@operation("listChatCompletionMessages")
async def list_messages(call: OperationCall) -> Any:
    page = page_of(call.query, order="asc")
    async with call.database.reading() as connection:
        one = await objects.get(connection, call.tenant, KIND, call.ids[0], call.now)
        data, has_more = await items.listed(connection, call.tenant, [one.id], page)
    return as_list(data, has_more=has_more)
