"""Conversations and their items."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from orchestrator.api.call import OperationCall, operation
from orchestrator.store import hot_keys, items, objects
from orchestrator.store.items import Item
from orchestrator.store.objects import StoredObject, new_id
from orchestrator.store.pages import as_list, page_of

KIND: Final = "conversation"


def shown(one: StoredObject) -> dict[str, Any]:
    return {"id": one.id, "object": "conversation", "created_at": int(one.created_at), **one.body}


@operation("createConversation")
async def create(call: OperationCall) -> Any:
    one = StoredObject(new_id("conv_"), call.now, None, "", "", {"metadata": call.body.get("metadata") or {}})
    async with call.database.writing() as connection:
        await objects.add(connection, call.tenant, KIND, one)
        new = [items.normalised(item) for item in call.body.get("items") or ()]
        await append(connection, call, one.id, new)
    return shown(one)


@operation("getConversation")
async def get(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        return shown(await _found(connection, call))


@operation("updateConversation")
async def update(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await _found(connection, call, for_update=True)
        one = one._replace(body={**one.body, "metadata": call.body.get("metadata") or {}})
        await objects.change(connection, call.tenant, one.id, one.body)
    return shown(one)


@operation("deleteConversation")
async def delete(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await _found(connection, call, for_update=True)
        await objects.delete(connection, [one.id])
    if call.hot_items is not None:
        await call.hot_items.forget([one.id])
    return {"id": one.id, "object": "conversation.deleted", "deleted": True}


@operation("createConversationItems")
async def create_items(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await _found(connection, call, for_update=True)
        new = [items.normalised(item) for item in call.body["items"]]
        await append(connection, call, one.id, new)
    return as_list(new, has_more=False)


@operation("listConversationItems")
async def list_items(call: OperationCall) -> Any:
    page = page_of(call.query)
    async with call.database.reading() as connection:
        one = await _found(connection, call)
        data, has_more = await items.listed(connection, call.tenant, [one.id], page)
    return as_list(data, has_more=has_more)


@operation("getConversationItem")
async def get_item(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        one = await _found(connection, call)
        return await _item(connection, call, one.id)


@operation("deleteConversationItem")
async def delete_item(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await _found(connection, call, for_update=True)
        await _item(connection, call, one.id)
        await items.delete(connection, one.id, call.ids[1])
        await hot_keys.drop(connection, one.id)
    return shown(one)


async def append(
    connection: AsyncConnection, call: OperationCall, conversation_id: str, new: list[Item], *, num_output: int = 0
) -> None:
    """Adds items to a conversation whose row is locked. Raises KvloomError (INVALID_ARGUMENT)."""
    most = call.settings.max_items
    if new and await items.count(connection, conversation_id) + len(new) > most:
        raise invalid_argument(f"items: a conversation has at most {most} (orchestrator.max_items).", "items")
    await items.append(connection, call.tenant, conversation_id, new, num_output=num_output)


async def _found(connection: AsyncConnection, call: OperationCall, *, for_update: bool = False) -> StoredObject:
    return await objects.get(connection, call.tenant, KIND, call.ids[0], call.now, for_update=for_update)


async def _item(connection: AsyncConnection, call: OperationCall, conversation_id: str) -> Item:
    item_id = call.ids[1]
    found = await items.find(connection, call.tenant, conversation_id, item_id)
    if found is None:
        message = f"The conversation has no item {item_id[:128]!r}."
        raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, message)
    return found
