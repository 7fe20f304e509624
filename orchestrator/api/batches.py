"""Batches: how they are made, found and cancelled. orchestrator/batches/ works at them."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from orchestrator.api import files
from orchestrator.api.call import OperationCall, operation
from orchestrator.batches import progress
from orchestrator.batches.progress import KIND
from orchestrator.database.schema import jobs
from orchestrator.store import objects
from orchestrator.store.objects import StoredObject, new_id
from orchestrator.store.pages import as_list, page_of

WINDOW_SECONDS: Final = 86_400
MAX_FILE_BYTES: Final = 200 * 2**20
_TIMES: Final = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_OVER: Final = ("completed", "failed", "expired", "cancelled")


async def _shown(connection: AsyncConnection, one: StoredObject) -> dict[str, Any]:
    nothing = dict.fromkeys((*(f"{name}_at" for name in _TIMES), "output_file_id", "error_file_id", "errors", "usage"))
    counts = one.body.get("request_counts") or await progress.counts(connection, one.id)
    body = {name: value for name, value in one.body.items() if name != "output_expires_after"}
    return {
        "id": one.id,
        "object": "batch",
        "created_at": int(one.created_at),
        "completion_window": "24h",
        **nothing,
        **body,
        "request_counts": counts,
    }


@operation("createBatch")
async def create(call: OperationCall) -> Any:
    given = call.body
    async with call.database.writing() as connection:
        file = await objects.get(connection, call.tenant, files.KIND, given["input_file_id"], call.now, "input_file_id")
        if file.body["purpose"] != "batch":
            raise invalid_argument("input_file_id: the file must have the purpose batch.", "input_file_id")
        if file.body["bytes"] > MAX_FILE_BYTES:
            raise invalid_argument(f"input_file_id: the file has more than {MAX_FILE_BYTES} bytes.", "input_file_id")
        body = {
            "status": "validating",
            "endpoint": given["endpoint"],
            "input_file_id": file.id,
            "metadata": given.get("metadata"),
            "expires_at": int(call.now) + WINDOW_SECONDS,
            "output_expires_after": given.get("output_expires_after"),
        }
        one = StoredObject(new_id("batch_"), call.now, None, "", "", body)
        await objects.add(connection, call.tenant, KIND, one)
        job = {"id": one.id, "tenant": call.tenant, "key_id": call.key_id, "created_at": call.now}
        await connection.execute(jobs.insert().values(**job, holder="", held_until=0.0))
        return await _shown(connection, one)


@operation("getBatch")
async def get(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        return await _shown(connection, await objects.get(connection, call.tenant, KIND, call.ids[0], call.now))


@operation("listBatches")
async def list_batches(call: OperationCall) -> Any:
    page = page_of(call.query)
    async with call.database.reading() as connection:
        found, has_more = await objects.listed(connection, call.tenant, KIND, page, call.now)
        return as_list([await _shown(connection, one) for one in found], has_more=has_more)


@operation("cancelBatch")
async def cancel(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await objects.get(connection, call.tenant, KIND, call.ids[0], call.now, for_update=True)
        status = one.body["status"]
        if status in _OVER:
            message = f"The batch is {status}, and cannot be cancelled."
            raise KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, message)
        if status != "cancelling":
            one = one._replace(body={**one.body, "status": "cancelling", "cancelling_at": int(call.now)})
            await objects.change(connection, call.tenant, one.id, one.body)
        return await _shown(connection, one)
