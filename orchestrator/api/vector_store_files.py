"""The files of vector stores, one by one and in batches. orchestrator/search/indexing.py works at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from orchestrator.api.call import OperationCall, operation, quota_reached
from orchestrator.search.chunking import ChunkSize, chunk_size
from orchestrator.store import objects, vector_chunks, vector_files
from orchestrator.store.objects import StoredObject, new_id
from orchestrator.store.pages import as_list, page_of
from orchestrator.store.vector_files import IN_PROGRESS, VectorFile

KIND: Final = "vector_store"
BATCH_KIND: Final = "file_batch"
FILE_KIND: Final = "store_file"
BATCH_SECONDS: Final = 30 * 86_400.0
"""How long a file batch is shown."""


def shown(one: VectorFile) -> dict[str, Any]:
    return {
        "id": one.file,
        "object": "vector_store.file",
        "created_at": int(one.created_at),
        "vector_store_id": one.store,
        "status": one.status,
        "usage_bytes": one.usage_bytes,
        "last_error": one.body["last_error"],
        "chunking_strategy": ChunkSize(**one.body["chunking"]).shown(),
        "attributes": one.body["attributes"],
    }


async def store_of(connection: AsyncConnection, call: OperationCall, *, for_update: bool = False) -> StoredObject:
    """The store that a call names. Raises KvloomError (NOT_FOUND)."""
    return await objects.get(connection, call.tenant, KIND, call.ids[0], call.now, for_update=for_update)


def check_chunking(strategy: Mapping[str, Any] | None, at: str = "chunking_strategy") -> None:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    static = (strategy or {}).get("static")
    if strategy is not None and (strategy["type"] == "static") != bool(static):
        raise invalid_argument(f"{at}.static goes with the type static, and only with it.", f"{at}.static")
    if static and 2 * static["chunk_overlap_tokens"] > static["max_chunk_size_tokens"]:
        field = f"{at}.static.chunk_overlap_tokens"
        raise invalid_argument(f"{field} must not exceed half of max_chunk_size_tokens.", field)


async def attach(
    connection: AsyncConnection,
    call: OperationCall,
    store: StoredObject,
    given: Sequence[Mapping[str, Any]],
    batch: str = "",
    field: str = "file_id",
) -> list[VectorFile]:
    """Has files indexed: `given` has their `file_id`, `attributes` and `chunking_strategy`. Raises KvloomError
    (NOT_FOUND, INVALID_ARGUMENT, FAILED_PRECONDITION)."""
    files: dict[str, VectorFile] = {}
    for one in given:
        check_chunking(one.get("chunking_strategy"))
        file = await objects.get(connection, call.tenant, "file", one["file_id"], call.now, field)
        size = chunk_size(one.get("chunking_strategy"), store.body["window"])
        body = {
            "filename": file.body["filename"],
            "attributes": one.get("attributes") or {},
            "chunking": size._asdict(),
            "last_error": None,
        }
        files[file.id] = VectorFile(store.id, file.id, call.now, batch, IN_PROGRESS, 0, 0, body)
    new = list(files.values())
    await vector_files.put(connection, call.tenant, call.key_id, store.id, new)
    if await vector_files.count(connection, store.id) > call.settings.max_files:
        raise quota_reached(f"A vector store has at most {call.settings.max_files} files (orchestrator.max_files).")
    return new


@operation("createVectorStoreFile")
async def create(call: OperationCall) -> Any:
    await call.searcher.ready()
    async with call.database.writing() as connection:
        store = await store_of(connection, call)
        return shown((await attach(connection, call, store, [call.body]))[0])


@operation("listVectorStoreFiles")
async def list_files(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        store = await store_of(connection, call)
        return await _listed(connection, call, store)


async def _listed(connection: AsyncConnection, call: OperationCall, store: StoredObject, batch: str = "") -> Any:
    page, status = page_of(call.query), call.query.get("filter", "")
    if status and status not in vector_files.STATUSES:
        raise invalid_argument(f"filter must be one of {', '.join(vector_files.STATUSES)}.", "filter")
    before = call.query.get("before", "")
    found, has_more = await vector_files.listed(connection, store.id, page, before, status, batch)
    return as_list([shown(one) for one in found], has_more=has_more)


@operation("getVectorStoreFile")
async def get(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        await store_of(connection, call)
        return shown(await _file_of(connection, call))


@operation("updateVectorStoreFile")
async def update(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        store = await store_of(connection, call)
        version = await vector_files.next_revision(connection, store.id)
        one = await _file_of(connection, call)
        one = one._replace(body={**one.body, "attributes": call.body.get("attributes") or {}})
        await vector_files.change(connection, store.id, one.file, one.body, version=version)
    return shown(one)


@operation("deleteVectorStoreFile")
async def delete(call: OperationCall) -> Any:
    """Takes the file out of the store. It stays a file."""
    async with call.database.writing() as connection:
        await store_of(connection, call)
        one = await _file_of(connection, call)
        await vector_files.remove(connection, one.store, [one.file])
    return {"id": one.file, "object": "vector_store.file.deleted", "deleted": True}


@operation("getVectorStoreFileContent")
async def get_content(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        await store_of(connection, call)
        one = await _file_of(connection, call)
        texts = await vector_chunks.texts(connection, call.tenant, one.store, one.file)
    data = [{"type": "text", "text": text} for text in texts]
    return {"object": "vector_store.file_content.page", "data": data, "has_more": False, "next_page": None}


async def _file_of(connection: AsyncConnection, call: OperationCall) -> VectorFile:
    found = await vector_files.find(connection, call.ids[0], call.ids[1])
    if found is None:
        raise objects.not_found(FILE_KIND, call.ids[1])
    return found


@operation("createVectorStoreFileBatch")
async def create_batch(call: OperationCall) -> Any:
    await call.searcher.ready()
    ids, entries = call.body.get("file_ids"), call.body.get("files")
    if bool(ids) == bool(entries):
        raise invalid_argument("Give either file_ids or files.", "file_ids")
    shared = {name: call.body.get(name) for name in ("attributes", "chunking_strategy")}
    given: Sequence[Mapping[str, Any]] = [{"file_id": name, **shared} for name in ids or ()] or entries or ()
    one = StoredObject(new_id("vsfb_"), call.now, call.now + BATCH_SECONDS, call.ids[0], "", {"is_cancelled": False})
    async with call.database.writing() as connection:
        store = await store_of(connection, call)
        await objects.add(connection, call.tenant, BATCH_KIND, one)
        await attach(connection, call, store, given, one.id, "file_ids" if ids else "files")
        return await _batch_shown(connection, one)


async def _batch_shown(connection: AsyncConnection, one: StoredObject) -> dict[str, Any]:
    counts = (await vector_files.counts(connection, [one.parent], one.id))[one.parent]
    numbers = {status: counts[status] for status in vector_files.STATUSES}
    total = sum(numbers.values())
    status = vector_files.COMPLETED
    if one.body["is_cancelled"]:
        status = vector_files.CANCELLED
    elif numbers[IN_PROGRESS]:
        status = IN_PROGRESS
    elif total and numbers[vector_files.FAILED] == total:
        status = vector_files.FAILED
    return {
        "id": one.id,
        "object": "vector_store.files_batch",
        "created_at": int(one.created_at),
        "vector_store_id": one.parent,
        "status": status,
        "file_counts": {**numbers, "total": total},
    }


async def _batch_of(connection: AsyncConnection, call: OperationCall, *, for_update: bool = False) -> StoredObject:
    store = await store_of(connection, call)
    one = await objects.get(connection, call.tenant, BATCH_KIND, call.ids[1], call.now, for_update=for_update)
    if one.parent != store.id:
        raise objects.not_found(BATCH_KIND, call.ids[1])
    return one


@operation("getVectorStoreFileBatch")
async def get_batch(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        return await _batch_shown(connection, await _batch_of(connection, call))


@operation("cancelVectorStoreFileBatch")
async def cancel_batch(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await _batch_of(connection, call, for_update=True)
        status = (await _batch_shown(connection, one))["status"]
        if status not in (IN_PROGRESS, vector_files.CANCELLED):
            message = f"The file batch is {status}, and cannot be cancelled."
            raise KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, message)
        one = one._replace(body={"is_cancelled": True})
        await objects.change(connection, call.tenant, one.id, one.body)
        await vector_files.cancel(connection, one.parent, one.id)
        return await _batch_shown(connection, one)


@operation("listVectorStoreFileBatchFiles")
async def list_batch_files(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        one = await _batch_of(connection, call)
        return await _listed(connection, call, await store_of(connection, call), one.id)
