"""Files, and parts of uploads, as streams of pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.orchestrator_service_pb2 import FileFacts, WriteFileRequest
from orchestrator.api import anthropic_files, files, uploads
from orchestrator.api.call import OperationCall
from orchestrator.store.objects import new_id


class _Content:
    """The pieces of a content, and what came with the last of them."""

    def __init__(self, requests: AsyncIterator[WriteFileRequest], max_bytes: int, limit: str) -> None:
        """`limit`: what an error calls it."""
        self._requests = requests
        self._max_bytes = max_bytes
        self._limit = limit
        self.num_bytes = 0
        self.facts = FileFacts()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Raises KvloomError."""
        async for request in self._requests:
            self.num_bytes += len(request.piece)
            if self.num_bytes > self._max_bytes:
                message = f"The content is larger than {self._max_bytes} bytes ({self._limit})."
                raise KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, message, field="file")
            if request.piece:
                yield request.piece
            if request.HasField("facts"):
                self.facts = request.facts
                files.check_facts(self.facts)
                return
        raise invalid_argument("The upload was broken off.", "file")


async def write_file(call: OperationCall, requests: AsyncIterator[WriteFileRequest]) -> Any:
    """Stores the content, then the file. Raises KvloomError."""
    file_id = new_id(call.contents.id_prefix("file-"))
    content = _Content(requests, call.settings.max_file_bytes, "orchestrator.max_file_bytes")
    async with call.database.reading() as connection:
        await files.check_quota(connection, call)
    await call.contents.write(call.tenant, file_id, content.pieces())
    try:
        one = await files.add(call, content.facts, file_id, content.num_bytes)
    except KvloomError:
        await call.contents.delete(file_id)
        raise
    return anthropic_files.shown(one) if content.facts.of_anthropic else files.shown(one)


async def write_part(call: OperationCall, upload_id: str, requests: AsyncIterator[WriteFileRequest]) -> Any:
    """Stores the content, then the part of the upload. Raises KvloomError."""
    part_id = new_id(call.contents.id_prefix("part_"))
    content = _Content(requests, await uploads.room(call, upload_id), "a part, or what the upload still lacks")
    await call.contents.write(call.tenant, part_id, content.pieces())
    try:
        return await uploads.add_part(call, upload_id, part_id, content.num_bytes)
    except KvloomError:
        await call.contents.delete(part_id)
        raise
