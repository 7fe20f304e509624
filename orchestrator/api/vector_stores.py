"""Vector stores, and searches in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import invalid_argument
from orchestrator.api import vector_store_files
from orchestrator.api.call import OperationCall, operation, quota_reached
from orchestrator.api.vector_store_files import KIND
from orchestrator.database.schema import objects as table
from orchestrator.search import filters
from orchestrator.search.searcher import Wanted
from orchestrator.store import objects, vector_files
from orchestrator.store.objects import StoredObject, new_id
from orchestrator.store.pages import as_list, page_of

DAY: Final = 86_400.0
NOTED_SECONDS: Final = 60.0
"""How often it is noted that a store is in use."""
MAX_QUERIES: Final = 16
DEFAULT_RESULTS: Final = 10
NO_RANKER: Final = "none"


async def _shown(connection: AsyncConnection, stores: Sequence[StoredObject]) -> list[dict[str, Any]]:
    counts = await vector_files.counts(connection, [one.id for one in stores])
    return [await _as_shown(connection, one, counts[one.id]) for one in stores]


async def _as_shown(connection: AsyncConnection, one: StoredObject, counts: Mapping[str, int]) -> dict[str, Any]:
    numbers = {status: counts[status] for status in vector_files.STATUSES}
    _, active_at = await vector_files.state_of(connection, one.id)
    body = {name: value for name, value in one.body.items() if name != "window"}
    return {
        "id": one.id,
        "object": "vector_store",
        "created_at": int(one.created_at),
        "status": "in_progress" if numbers["in_progress"] else "completed",
        "file_counts": {**numbers, "total": sum(numbers.values())},
        "usage_bytes": counts["bytes"],
        "last_active_at": int(active_at),
        "expires_at": None if one.expires_at is None else int(one.expires_at),
        **body,
    }


def _expires_at(expiry: Mapping[str, Any] | None, now: float) -> float | None:
    return None if expiry is None else now + expiry["days"] * DAY


@operation("createVectorStore")
async def create(call: OperationCall) -> Any:
    given = call.body
    await call.searcher.ready()
    vector_store_files.check_chunking(given.get("chunking_strategy"))
    body = {
        "name": given.get("name") or "",
        "description": given.get("description"),
        "metadata": given.get("metadata") or {},
        "expires_after": given.get("expires_after"),
        "embedding_model": call.query["embedding_model"],
        "window": int(call.query["embedding_window"]),
    }
    one = StoredObject(new_id("vs_"), call.now, _expires_at(body["expires_after"], call.now), "", "", body)
    async with call.database.writing() as connection:
        await _check_quota(connection, call)
        await objects.add(connection, call.tenant, KIND, one)
        await vector_files.begin_store(connection, one.id, call.now)
        strategy = given.get("chunking_strategy")
        files = [{"file_id": name, "chunking_strategy": strategy} for name in given.get("file_ids") or ()]
        await vector_store_files.attach(connection, call, one, files, field="file_ids")
        return (await _shown(connection, [one]))[0]


async def _check_quota(connection: AsyncConnection, call: OperationCall) -> None:
    """Raises KvloomError (FAILED_PRECONDITION)."""
    wanted = sa.select(sa.func.count()).where(table.c.tenant == call.tenant, table.c.kind == KIND)
    if (await connection.scalar(wanted) or 0) >= call.settings.max_vector_stores:
        most = call.settings.max_vector_stores
        raise quota_reached(f"There are {most} vector stores already (orchestrator.max_vector_stores).")


@operation("listVectorStores")
async def list_stores(call: OperationCall) -> Any:
    page = page_of(call.query)
    async with call.database.reading() as connection:
        found, has_more = await objects.listed(connection, call.tenant, KIND, page, call.now)
        return as_list(await _shown(connection, found), has_more=has_more)


@operation("getVectorStore")
async def get(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        return (await _shown(connection, [await vector_store_files.store_of(connection, call)]))[0]


@operation("updateVectorStore")
async def update(call: OperationCall) -> Any:
    """Fields that are not given, or null, stay as they are."""
    async with call.database.writing() as connection:
        one = await vector_store_files.store_of(connection, call, for_update=True)
        given = {name: call.body.get(name) for name in ("name", "metadata", "expires_after")}
        body = {**one.body, **{name: value for name, value in given.items() if value is not None}}
        await objects.change(connection, call.tenant, one.id, body)
        await _note_use(connection, call, one._replace(body=body))
        return (await _shown(connection, [await vector_store_files.store_of(connection, call)]))[0]


@operation("deleteVectorStore")
async def delete(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await vector_store_files.store_of(connection, call)
        await objects.delete(connection, [one.id])
    call.searcher.forget(one.id)
    return {"id": one.id, "object": "vector_store.deleted", "deleted": True}


async def _note_use(connection: AsyncConnection, call: OperationCall, one: StoredObject) -> None:
    await vector_files.note_use(connection, one.id, call.now)
    expires_at = _expires_at(one.body["expires_after"], call.now)
    await connection.execute(table.update().where(table.c.id == one.id).values(expires_at=expires_at))


@operation("searchVectorStore")
async def search(call: OperationCall) -> Any:
    wanted = _wanted(call.body)
    async with call.database.reading() as connection:
        one = await vector_store_files.store_of(connection, call)
        _, active_at = await vector_files.state_of(connection, one.id)
    if call.now - active_at >= NOTED_SECONDS:
        async with call.database.writing() as connection:
            await _note_use(connection, call, one)
    found = await call.searcher.search(call.tenant, call.key_id, one.id, one.body["embedding_model"], wanted)
    async with call.database.reading() as connection:
        names = dict.fromkeys(chunk.file for _, chunk in found)
        files = {name: await vector_files.find(connection, one.id, name) for name in names}
    data: list[dict[str, Any]] = []
    for each, chunk in found:
        file = files[chunk.file]
        if file is not None:  # it was removed meanwhile
            data.append(
                {
                    "file_id": file.file,
                    "filename": file.body["filename"],
                    "score": round(each.score, 6),
                    "attributes": file.body["attributes"],
                    "content": [{"type": "text", "text": chunk.text}],
                }
            )
    page = {"object": "vector_store.search_results.page", "search_query": list(wanted.queries), "data": data}
    return {**page, "has_more": False, "next_page": None}


def _wanted(body: Mapping[str, Any]) -> Wanted:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    given = body["query"]
    queries = [given] if isinstance(given, str) else given
    if not queries or len(queries) > MAX_QUERIES or not all(query.strip() for query in queries):
        raise invalid_argument(f"query must be a text, or 1 to {MAX_QUERIES} texts, that are not empty.", "query")
    wanted = body.get("filters")
    if wanted is not None:
        filters.check(wanted)
    options = body.get("ranking_options") or {}
    weights = options.get("hybrid_search") or {}
    by_vector, by_words = (weights.get(f"{name}_weight") for name in ("embedding", "text"))
    vector_weight, word_weight = (1.0 if weight is None else weight for weight in (by_vector, by_words))
    if vector_weight <= 0 and word_weight <= 0:
        field = "ranking_options.hybrid_search"
        raise invalid_argument(f"{field}: one of the weights must be greater than 0.", field)
    return Wanted(
        queries,
        body.get("max_num_results") or DEFAULT_RESULTS,
        wanted,
        options.get("score_threshold") or 0.0,
        is_fused=options.get("ranker") != NO_RANKER,
        vector_weight=vector_weight,
        word_weight=word_weight,
    )
