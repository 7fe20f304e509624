"""Files as streams of pieces: uploads and downloads."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.orchestrator_service_pb2 import FileFacts, WriteFileRequest
from orchestrator.api import files
from orchestrator.api.call import OperationCall
from orchestrator.store.objects import ID_BYTES


async def write_file(call: OperationCall, requests: AsyncIterator[WriteFileRequest]) -> Any:
    """Stores the content, then the file. `requests`: the pieces, and the facts with the last of them. Raises
    KvloomError."""
    file_id = call.contents.new_id(os.urandom(ID_BYTES).hex())
    facts: FileFacts | None = None
    num_bytes = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal facts, num_bytes
        async for request in requests:
            num_bytes += len(request.piece)
            if num_bytes > call.settings.max_file_bytes:
                most = call.settings.max_file_bytes
                message = f"The file is larger than {most} bytes (orchestrator.max_file_bytes)."
                raise KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, message, field="file")
            if request.piece:
                yield request.piece
            if request.HasField("facts"):
                facts = request.facts
                files.check_facts(facts)
                return
        raise invalid_argument("The upload was broken off.", "file")

    async with call.database.reading() as connection:
        await files.check_quota(connection, call)
    await call.contents.write(call.tenant, file_id, pieces())
    assert facts is not None
    try:
        return await files.add(call, facts, file_id, num_bytes)
    except KvloomError:
        await call.contents.delete(file_id)
        raise
