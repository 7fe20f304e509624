"""Erasures: all that is stored of a tenant, or of one of its users, is deleted for good. The record of it stays."""

from __future__ import annotations

from typing import Any

from orchestrator.api.call import OperationCall, operation
from orchestrator.database.schema import jobs
from orchestrator.jobs.erasure import KIND, digest_of
from orchestrator.store import objects
from orchestrator.store.objects import StoredObject, new_id
from orchestrator.store.pages import as_list, page_of


def shown(one: StoredObject) -> dict[str, Any]:
    body = {name: value for name, value in one.body.items() if name != "user"}
    return {"id": one.id, "object": "erasure", "created_at": int(one.created_at), **body}


@operation("createErasure")
async def create(call: OperationCall) -> Any:
    """`query["tenant"]`: whose objects they are, which the edge has checked."""
    user = call.body.get("safety_identifier")
    body = {
        "status": "in_progress",
        "completed_at": None,
        "tenant": call.query["tenant"],
        "safety_identifier_sha256": None if user is None else digest_of(user),
        "counts": {},
        "user": user,
    }
    one = StoredObject(new_id("erasure_"), call.now, None, "", "", body)
    job = {"id": one.id, "tenant": call.tenant, "key_id": call.key_id, "created_at": call.now, "kind": KIND}
    async with call.database.writing() as connection:
        await objects.add(connection, call.tenant, KIND, one)
        await connection.execute(jobs.insert().values(**job, holder="", held_until=0.0))
    return shown(one)


@operation("getErasure")
async def get(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        return shown(await objects.get(connection, call.tenant, KIND, call.ids[0], call.now))


@operation("listErasures")
async def list_erasures(call: OperationCall) -> Any:
    page = page_of(call.query)
    async with call.database.reading() as connection:
        found, has_more = await objects.listed(connection, call.tenant, KIND, page, call.now)
    return as_list([shown(one) for one in found], has_more=has_more)
