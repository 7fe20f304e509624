"""Feedback on stored responses: thumbs, and a text. A response has one."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from orchestrator.api.call import OperationCall, operation
from orchestrator.store import objects
from orchestrator.store.objects import StoredObject, feedback_id
from orchestrator.store.pages import as_list, page_of

KIND: Final = "feedback"
RATINGS: Final = ("up", "down")
_RESPONSE: Final = "response"


def shown(one: StoredObject) -> dict[str, Any]:
    return {"id": one.id, "object": "feedback", "created_at": int(one.created_at), **one.body}


@operation("giveFeedback")
async def give(call: OperationCall) -> Any:
    """It replaces the one that there is."""
    rating, text = call.body.get("rating"), call.body.get("text")
    if rating is None and not text:
        raise invalid_argument("Feedback has a rating, a text or both.", "rating")
    async with call.database.writing() as connection:
        response = await _response(connection, call)
        body = {"response_id": response.id, "rating": rating, "text": text}
        own = feedback_id(response.id)
        one = StoredObject(own, call.now, response.expires_at, response.id, rating or "", body)
        known = await objects.find(connection, call.tenant, KIND, own, call.now, for_update=True)
        if known is None:
            await objects.add(connection, call.tenant, KIND, one)
        else:
            one = one._replace(created_at=known.created_at)
            await objects.change(connection, call.tenant, own, body, one.label)
    return shown(one)


@operation("getFeedback")
async def get(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        return shown(await _found(connection, call))


@operation("deleteFeedback")
async def delete(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await _found(connection, call)
        await objects.delete(connection, [one.id])
    return {"id": one.id, "object": "feedback.deleted", "deleted": True}


@operation("listFeedback")
async def list_feedback(call: OperationCall) -> Any:
    page, rating = page_of(call.query), call.query.get("rating", "")
    if rating and rating not in RATINGS:
        raise invalid_argument(f"rating must be {' or '.join(RATINGS)}.", "rating")
    async with call.database.reading() as connection:
        found, has_more = await objects.listed(connection, call.tenant, KIND, page, call.now, rating)
    return as_list([shown(one) for one in found], has_more=has_more)


async def _response(connection: AsyncConnection, call: OperationCall) -> StoredObject:
    return await objects.get(connection, call.tenant, _RESPONSE, call.ids[0], call.now)


async def _found(connection: AsyncConnection, call: OperationCall) -> StoredObject:
    response = await _response(connection, call)
    one = await objects.find(connection, call.tenant, KIND, feedback_id(response.id), call.now)
    if one is None:
        raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, "There is no feedback on this response.")
    return one
