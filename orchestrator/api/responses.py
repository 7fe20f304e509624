"""Stored responses: their context, and how they are kept, found and deleted."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.orchestrator_service_pb2 import (
    BeginResponseRequest,
    KeepResponseRequest,
    ReadContextRequest,
    ReadContextResponse,
)
from orchestrator.api import chat_completions, conversations, prompts
from orchestrator.api.call import OperationCall, operation
from orchestrator.background import rows
from orchestrator.database.schema import jobs, runs
from orchestrator.database.schema import objects as table
from orchestrator.seal import seal_of
from orchestrator.store import items, objects
from orchestrator.store.objects import StoredObject
from orchestrator.store.pages import as_list, page_of
from orchestrator.webhooks import outbox

if TYPE_CHECKING:
    from orchestrator.store.hot_items import Copies, HotRead

KIND: Final = "response"
GENERATION: Final = "generation"
_PREVIOUS: Final = "previous_response_id"


async def read_context(call: OperationCall, request: ReadContextRequest) -> ReadContextResponse:
    """Raises KvloomError (NOT_FOUND, INVALID_ARGUMENT)."""
    hot: HotRead | None = None
    copies: Copies | None = None
    if request.conversation_id and call.hot_items is not None:
        copies = await call.hot_items.copies(request.conversation_id)
    async with call.database.reading() as connection:
        parents: Sequence[str] = ()
        if request.conversation_id:
            named = request.conversation_id
            if call.hot_items is None or copies is None:
                await objects.get(connection, call.tenant, conversations.KIND, named, call.now, "conversation")
                parents = (named,)
            else:
                hot = await call.hot_items.read(connection, call.tenant, named, call.now, copies)
                if hot is None:
                    raise objects.not_found(conversations.KIND, named, "conversation")
        elif request.previous_response_id:
            parents = await _lineage(connection, call, request.previous_response_id, _PREVIOUS)
        fork = ReadContextResponse()
        if request.WhichOneof("fork"):
            parents = await _fork(connection, call, request, parents, fork)
        found = [body for parent in parents for body in await items.of_parent(connection, call.tenant, parent)]
        if hot is not None:
            found = hot.bodies
        if len(found) > call.settings.max_items:
            field = "conversation" if request.conversation_id else _PREVIOUS
            most = call.settings.max_items
            raise invalid_argument(f"{field}: there are more than {most} items (orchestrator.max_items).", field)
        referred = await items.of_ids(connection, call.tenant, list(request.item_ids), call.now)
        prompt = b""
        if request.prompt_id:
            prompt = objects.as_json(await prompts.read(connection, call, request.prompt_id, request.prompt_version))
    if hot is not None and call.hot_items is not None:
        await call.hot_items.note(call.database, hot)
    for item_id in request.item_ids:
        if item_id not in referred:
            message = f"There is no item {item_id[:128]!r}."
            raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, message, field="input")
    named = [referred[item_id] for item_id in request.item_ids]
    fork.MergeFrom(ReadContextResponse(items=found, referred_items=named, prompt=prompt))
    return fork


async def _fork(
    connection: AsyncConnection,
    call: OperationCall,
    request: ReadContextRequest,
    parents: Sequence[str],
    fork: ReadContextResponse,
) -> Sequence[str]:
    """The responses that a fork follows, of those that `previous_response_id` ends. `fork` gets what else there is to
    tell of it. Raises KvloomError (NOT_FOUND, FAILED_PRECONDITION)."""
    number, own = len(parents) - 1, list[bytes]()
    if request.WhichOneof("fork") == "at_token":
        one = await objects.find(connection, call.tenant, GENERATION, objects.generation_id(parents[-1]), call.now)
        if one is None:
            message = f"The response {parents[-1]!r} cannot be continued at a token, but at an item."
            raise KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, message, field="at")
        fork.generation = objects.as_json(one.body)
        own = await items.of_parent(connection, call.tenant, parents[-1], is_output=False)
    else:
        place = await items.place_of(connection, parents, request.at_item)
        if place is None:
            message = f"There is no item {request.at_item[:128]!r} in this response, or before it."
            raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, message, field="at")
        number, num_items = parents.index(place[0]), place[1] + 1
        own = await items.of_parent(connection, call.tenant, place[0])
        if num_items == len(own):
            number, num_items = number + 1, 0
        own = own[:num_items]
    fork.forked_items.extend(own)
    fork.forked_from = parents[number - 1] if number else ""
    return parents[:number]


async def keep(call: OperationCall, request: KeepResponseRequest) -> None:
    """Raises KvloomError (NOT_FOUND, INVALID_ARGUMENT)."""
    response = msgspec.json.decode(request.response, type=dict[str, Any])
    if response["object"] == "chat.completion":
        await chat_completions.keep(call, request, response)
        return
    output = response.pop("output")
    given = [items.normalised(msgspec.json.decode(raw)) for raw in request.input_items]
    new = [*given, *output]
    async with call.database.writing() as connection:
        conversation = None
        if request.conversation_id:
            conversation = await objects.get(
                *(connection, call.tenant, conversations.KIND, request.conversation_id, call.now, "conversation"),
                for_update=True,
            )
        one = StoredObject(response["id"], call.now, call.expires_at, request.previous_response_id, "", response)
        if not await objects.add(connection, call.tenant, KIND, one):
            return  # it is a repetition
        await items.append(connection, call.tenant, one.id, new, num_output=len(output))
        if request.generation:
            body = msgspec.json.decode(request.generation)
            own = StoredObject(objects.generation_id(one.id), call.now, call.expires_at, one.id, "", body)
            await objects.add(connection, call.tenant, GENERATION, own)
        if conversation is not None:
            await conversations.append(connection, call, conversation.id, new, num_output=len(output))


async def begin(call: OperationCall, request: BeginResponseRequest) -> None:
    """Raises KvloomError (NOT_FOUND, QUEUE_FULL)."""
    kept = request.kept
    response = msgspec.json.decode(kept.response, type=dict[str, Any])
    del response["output"]
    given = [items.normalised(msgspec.json.decode(raw)) for raw in kept.input_items]
    async with call.database.writing() as connection:
        if kept.conversation_id:
            await objects.get(
                connection, call.tenant, conversations.KIND, kept.conversation_id, call.now, "conversation"
            )
        await _check_queue(connection, call)
        one = StoredObject(response["id"], call.now, call.expires_at, kept.previous_response_id, "", response)
        if not await objects.add(connection, call.tenant, KIND, one):
            return  # it is a repetition
        await items.append(connection, call.tenant, one.id, given)
        run = {
            "response": one.id,
            "body": seal_of(connection).sealed(call.tenant, request.body),
            "seed": secrets.randbits(63),
            "priority_class": request.priority_class,
            "conversation": kept.conversation_id,
            "num_sent": 0,
            "sent_digest": b"",
        }
        await connection.execute(runs.insert().values(run))
        job = {"id": one.id, "tenant": call.tenant, "key_id": call.key_id, "created_at": call.now, "kind": KIND}
        await connection.execute(jobs.insert().values(**job, holder="", held_until=0.0))


async def _check_queue(connection: AsyncConnection, call: OperationCall) -> None:
    wanted = sa.select(sa.func.count()).where(jobs.c.tenant == call.tenant, jobs.c.kind == KIND)
    if (await connection.scalar(wanted) or 0) >= call.settings.max_background:
        message = f"{call.settings.max_background} background responses run already (orchestrator.max_background)."
        raise KvloomError(ErrorReason.ERROR_REASON_QUEUE_FULL, message, retry_after_seconds=1.0)


async def check_has_events(call: OperationCall) -> None:
    """Raises KvloomError (NOT_FOUND)."""
    async with call.database.reading() as connection:
        if not (await _found(connection, call)).body.get("background"):
            raise objects.not_found(KIND, call.ids[0])


async def stored_events(call: OperationCall) -> tuple[list[bytes], bool]:
    """The events of a background response that has ended, and True if no more can come."""
    async with call.database.reading() as connection:
        events = await rows.read_events(connection, call.tenant, call.ids[0])
        one = await objects.find(connection, call.tenant, KIND, call.ids[0], call.now)
        is_over = events is not None or one is None or one.body["status"] not in rows.OPEN
    return events or [], is_over


@operation("cancelResponse")
async def cancel(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await objects.get(connection, call.tenant, KIND, call.ids[0], call.now, for_update=True)
        if not one.body.get("background"):
            message = "Only responses with background: true can be cancelled."
            raise KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, message)
        if one.body["status"] in rows.OPEN:
            one = one._replace(body={**one.body, "status": "cancelled"})
            await objects.change(connection, call.tenant, one.id, one.body)
            await outbox.announce(connection, call.tenant, "response.cancelled", one.id, call.now)
        output = await items.of_parent(connection, call.tenant, one.id, is_output=True)
    return {**one.body, "output": [msgspec.Raw(body) for body in output]}


@operation("getResponse")
async def get(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        one = await _found(connection, call)
        output = await items.of_parent(connection, call.tenant, one.id, is_output=True)
    return {**one.body, "output": [msgspec.Raw(body) for body in output]}


@operation("deleteResponse")
async def delete(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await _found(connection, call)
        await objects.delete(connection, [one.id])
    return {"id": one.id, "object": "response.deleted", "deleted": True}


@operation("listInputItems")
async def list_input_items(call: OperationCall) -> Any:
    page = page_of(call.query)
    async with call.database.reading() as connection:
        one = await _found(connection, call)
        parents = await _lineage(connection, call, one.id, "") if one.parent else [one.id]
        data, has_more = await items.listed(connection, call.tenant, parents, page, only_input_of=one.id)
    return as_list(data, has_more=has_more)


async def _found(connection: AsyncConnection, call: OperationCall) -> StoredObject:
    return await objects.get(connection, call.tenant, KIND, call.ids[0], call.now)


async def _lineage(connection: AsyncConnection, call: OperationCall, response_id: str, field: str) -> list[str]:
    """The ids of a response and of those before it, the earliest first. Raises KvloomError (NOT_FOUND) if there is one
    that is not there any more: without it, the model would answer something else."""
    is_own = sa.and_(table.c.tenant == call.tenant, table.c.kind == KIND, table.c.expires_at > call.now)
    first = sa.select(table.c.id, table.c.parent, sa.literal(0).label("depth")).where(table.c.id == response_id, is_own)
    chain = first.cte("chain", recursive=True)
    before = sa.select(table.c.id, table.c.parent, chain.c.depth + 1).where(
        table.c.id == chain.c.parent, is_own, chain.c.depth < call.settings.max_items
    )
    chain = chain.union_all(before)
    rows = (await connection.execute(sa.select(chain.c.id, chain.c.parent).order_by(chain.c.depth.desc()))).all()
    if not rows:
        raise objects.not_found(KIND, response_id, field)
    if rows[0].parent:
        message = f"A response before {response_id[:128]!r} was deleted or has expired."
        raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, message, field=field)
    return [row.id for row in rows]
