"""Uploads: files that arrive in parts. Parts are stored as files are, and put together when all are there."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.orchestrator_service_pb2 import FileFacts
from orchestrator.api import files
from orchestrator.api.call import OperationCall, operation, quota_reached
from orchestrator.database.schema import objects as table
from orchestrator.store import objects
from orchestrator.store.objects import StoredObject, new_id

KIND: Final = "upload"
PART_KIND: Final = "upload_part"
PENDING: Final = "pending"
UPLOAD_SECONDS: Final = 3600.0
MAX_PART_BYTES: Final = 64 * 2**20
MAX_PARTS: Final = 1000
MAX_PENDING: Final = 100
"""Uploads of a tenant."""


def shown(one: StoredObject) -> dict[str, Any]:
    return {
        "id": one.id,
        "object": "upload",
        "created_at": int(one.created_at),
        "expires_at": int(one.expires_at or 0),
        **{name: one.body[name] for name in ("filename", "purpose", "bytes", "mime_type", "status", "file")},
    }


@operation("createUpload")
async def create(call: OperationCall) -> Any:
    given = call.body
    seconds = (given.get("expires_after") or {}).get("seconds", 0)
    files.check_facts(FileFacts(filename=given["filename"], purpose=given["purpose"], expires_after_seconds=seconds))
    if given["bytes"] > call.settings.max_file_bytes:
        most = call.settings.max_file_bytes
        raise invalid_argument(f"bytes must be at most {most} (orchestrator.max_file_bytes).", "bytes")
    body = {
        **{name: given[name] for name in ("filename", "purpose", "bytes", "mime_type")},
        "expires_after_seconds": seconds,
        "status": PENDING,
        "file": None,
    }
    one = StoredObject(new_id("upload_"), call.now, call.now + UPLOAD_SECONDS, "", PENDING, body)
    async with call.database.writing() as connection:
        await files.check_quota(connection, call)
        if await objects.count(connection, call.tenant, KIND, call.now, PENDING) >= MAX_PENDING:
            raise quota_reached(f"There are {MAX_PENDING} uploads already that are neither completed nor cancelled.")
        await objects.add(connection, call.tenant, KIND, one)
    return shown(one)


async def room(call: OperationCall, upload_id: str) -> int:
    """How many bytes the next part may have. Raises KvloomError (NOT_FOUND, FAILED_PRECONDITION)."""
    async with call.database.reading() as connection:
        upload = await _pending(connection, call, upload_id)
        return min(MAX_PART_BYTES, await _lacking(connection, call, upload))


async def add_part(call: OperationCall, upload_id: str, part_id: str, num_bytes: int) -> Any:
    """Makes the row of a part whose content is stored. Raises KvloomError (NOT_FOUND, FAILED_PRECONDITION)."""
    async with call.database.writing() as connection:
        upload = await _pending(connection, call, upload_id, for_update=True)
        if num_bytes > await _lacking(connection, call, upload):
            message = "The parts have more bytes than the upload was made for."
            raise KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, message, field="data")
        part = StoredObject(part_id, call.now, upload.expires_at, upload.id, "", {"bytes": num_bytes})
        await objects.add(connection, call.tenant, PART_KIND, part)
    return {"id": part_id, "object": "upload.part", "created_at": int(call.now), "upload_id": upload_id}


@operation("completeUpload")
async def complete(call: OperationCall) -> Any:
    wanted: list[str] = call.body["part_ids"]
    async with call.database.reading() as connection:
        upload = await _found(connection, call, call.ids[0])
        parts = await _parts(connection, call, upload)
    if upload.body["status"] == "completed":
        return shown(upload)  # it is a repetition
    _check_parts(upload, parts, wanted)
    file_id, digest = new_id(call.contents.id_prefix("file-")), hashlib.md5(usedforsecurity=False)

    async def pieces() -> AsyncIterator[bytes]:
        for part_id in wanted:
            async for piece in call.contents.read(call.tenant, part_id):
                digest.update(piece)
                yield piece

    await call.contents.write(call.tenant, file_id, pieces())
    try:
        if (md5 := call.body.get("md5")) and md5.lower() != digest.hexdigest():
            raise invalid_argument("md5: the parts have another checksum.", "md5")
        upload = await _finish(call, upload, file_id)
    except KvloomError:
        await call.contents.delete(file_id)
        raise
    for part_id in parts:
        await call.contents.delete(part_id)
    return shown(upload)


async def _finish(call: OperationCall, upload: StoredObject, file_id: str) -> StoredObject:
    given = upload.body
    facts = FileFacts(
        filename=given["filename"],
        purpose=given["purpose"],
        mime_type=given["mime_type"],
        expires_after_seconds=given["expires_after_seconds"],
    )
    async with call.database.writing() as connection:
        upload = await _pending(connection, call, upload.id, for_update=True)
        file = await files.add_within(connection, call, facts, file_id, given["bytes"])
        return await _end(connection, call, upload, "completed", files.shown(file))


@operation("cancelUpload")
async def cancel(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        upload = await _pending(connection, call, call.ids[0], for_update=True)
        parts = await _parts(connection, call, upload)
        upload = await _end(connection, call, upload, "cancelled", None)
    for part_id in parts:
        await call.contents.delete(part_id)
    return shown(upload)


async def _end(
    connection: AsyncConnection, call: OperationCall, upload: StoredObject, status: str, file: Any
) -> StoredObject:
    upload = upload._replace(label=status, body={**upload.body, "status": status, "file": file})
    await objects.change(connection, call.tenant, upload.id, upload.body, status)
    await objects.delete(connection, list(await _parts(connection, call, upload)))
    return upload


def _check_parts(upload: StoredObject, parts: Mapping[str, int], wanted: list[str]) -> None:
    """Raises KvloomError (NOT_FOUND, INVALID_ARGUMENT, FAILED_PRECONDITION)."""
    _check_pending(upload)
    if len(set(wanted)) != len(wanted):
        raise invalid_argument("part_ids must not have a part twice.", "part_ids")
    for part_id in wanted:
        if part_id not in parts:
            raise objects.not_found(PART_KIND, part_id, "part_ids")
    num_bytes = sum(parts[part_id] for part_id in wanted)
    if num_bytes != upload.body["bytes"]:
        message = f"part_ids: the parts have {num_bytes} bytes, and the upload was made for {upload.body['bytes']}."
        raise invalid_argument(message, "part_ids")


async def _parts(connection: AsyncConnection, call: OperationCall, upload: StoredObject) -> dict[str, int]:
    """The sizes of the parts, by their ids."""
    is_part = sa.and_(table.c.tenant == call.tenant, table.c.kind == PART_KIND, table.c.parent == upload.id)
    rows = await connection.execute(sa.select(table.c.id, table.c.body).where(is_part))
    return {row.id: objects.body_of(connection, call.tenant, row)["bytes"] for row in rows}


async def _lacking(connection: AsyncConnection, call: OperationCall, upload: StoredObject) -> int:
    """How many bytes the upload still lacks. Raises KvloomError (FAILED_PRECONDITION)."""
    parts = await _parts(connection, call, upload)
    if len(parts) >= MAX_PARTS:
        raise quota_reached(f"The upload has {MAX_PARTS} parts already.")
    return upload.body["bytes"] - sum(parts.values())


async def _pending(
    connection: AsyncConnection, call: OperationCall, upload_id: str, *, for_update: bool = False
) -> StoredObject:
    upload = await _found(connection, call, upload_id, for_update=for_update)
    _check_pending(upload)
    return upload


def _check_pending(upload: StoredObject) -> None:
    if upload.body["status"] != PENDING:
        message = f"The upload is {upload.body['status']}."
        raise KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, message)


async def _found(
    connection: AsyncConnection, call: OperationCall, upload_id: str, *, for_update: bool = False
) -> StoredObject:
    return await objects.get(connection, call.tenant, KIND, upload_id, call.now, for_update=for_update)
