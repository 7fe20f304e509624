"""Files: their rows. Their contents are written and read by orchestrator/service/file_streams.py."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import invalid_argument
from kvloom.v1.orchestrator_service_pb2 import FileFacts
from orchestrator.api.call import OperationCall, operation, quota_reached
from orchestrator.store import objects
from orchestrator.store.objects import StoredObject, new_file
from orchestrator.store.pages import as_list, page_of

KIND: Final = "file"
PURPOSES: Final = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
MAX_NAME_CHARS: Final = 512
MIN_EXPIRY_SECONDS: Final = 3600
MAX_EXPIRY_SECONDS: Final = 30 * 86_400
MAX_PAGE: Final = 10_000


def shown(one: StoredObject) -> dict[str, Any]:
    return {
        "id": one.id,
        "object": "file",
        "created_at": int(one.created_at),
        "expires_at": None if one.expires_at is None else int(one.expires_at),
        "status": "processed",
        "status_details": None,
        **{name: value for name, value in one.body.items() if name != "mime_type"},
    }


def check_facts(facts: FileFacts) -> None:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    if facts.purpose not in PURPOSES:
        raise invalid_argument(f"purpose must be one of {', '.join(PURPOSES)}.", "purpose")
    if not facts.filename or len(facts.filename) > MAX_NAME_CHARS:
        raise invalid_argument(f"file must have a name of at most {MAX_NAME_CHARS} characters.", "file")
    expiry, most, field = facts.expires_after_seconds, MAX_EXPIRY_SECONDS, "expires_after[seconds]"
    if facts.of_anthropic:
        most, field = 3 * MAX_EXPIRY_SECONDS, "expires_in_seconds"
    if expiry and not MIN_EXPIRY_SECONDS <= expiry <= most:
        raise invalid_argument(f"{field} must be from {MIN_EXPIRY_SECONDS} to {most}.", field)


async def add(call: OperationCall, facts: FileFacts, file_id: str, num_bytes: int) -> StoredObject:
    """Makes the row of a file whose content is stored. Raises KvloomError (FAILED_PRECONDITION)."""
    async with call.database.writing() as connection:
        return await add_within(connection, call, facts, file_id, num_bytes)


async def add_within(
    connection: AsyncConnection, call: OperationCall, facts: FileFacts, file_id: str, num_bytes: int
) -> StoredObject:
    """Does what `add` does, as a part of a transaction."""
    seconds = facts.expires_after_seconds or (MAX_EXPIRY_SECONDS if facts.purpose == "batch" else 0)
    expires_at = call.now + seconds if seconds else None
    one = new_file(facts.filename, facts.purpose, num_bytes, call.now, expires_at, file_id, facts.mime_type)
    await check_quota(connection, call)
    await objects.add(connection, call.tenant, KIND, one)
    return one


async def check_quota(connection: AsyncConnection, call: OperationCall) -> None:
    """Raises KvloomError (FAILED_PRECONDITION) if the tenant may have no further file."""
    if await objects.count(connection, call.tenant, KIND, call.now) >= call.settings.max_files:
        raise quota_reached(f"There are {call.settings.max_files} files already (orchestrator.max_files).")


@operation("listFiles")
async def list_files(call: OperationCall) -> Any:
    page = page_of(call.query, default=MAX_PAGE, most=MAX_PAGE)
    async with call.database.reading() as connection:
        found, has_more = await objects.listed(
            connection, call.tenant, KIND, page, call.now, call.query.get("purpose", "")
        )
    return as_list([shown(one) for one in found], has_more=has_more)


@operation("getFile")
async def get(call: OperationCall) -> Any:
    return shown(await find(call))


@operation("deleteFile")
async def delete(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await objects.get(connection, call.tenant, KIND, call.ids[0], call.now)
        await objects.delete(connection, [one.id])
    await call.contents.delete(one.id)
    return {"id": one.id, "object": "file", "deleted": True}


async def find(call: OperationCall) -> StoredObject:
    """Raises KvloomError (NOT_FOUND)."""
    async with call.database.reading() as connection:
        return await objects.get(connection, call.tenant, KIND, call.ids[0], call.now)
