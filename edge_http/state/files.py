"""POST /v1/files and GET /v1/files/{id}/content: files as streams, of which no process has more than a piece."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import aiohttp
import msgspec
from aiohttp import web

from edge_http.edge import Edge
from edge_http.endpoints.ownership import owner_of
from edge_http.state.handler import MAX_ID_CHARS, orchestrator_of
from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.orchestrator_service_pb2 import FileFacts, Owner, WriteFileRequest

MAX_FIELD_BYTES: Final = 4096
PIECE_BYTES: Final = 256 * 2**10
_ANCHOR: Final = "expires_after[anchor]"
_SECONDS: Final = "expires_after[seconds]"


async def create_file(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/files."""
    orchestrator = orchestrator_of(edge, request)
    if request.content_type != "multipart/form-data":
        message = "A file must be sent with Content-Type: multipart/form-data."
        raise KvloomError(ErrorReason.ERROR_REASON_UNSUPPORTED_MEDIA_TYPE, message)
    with edge.admit(edge.callers.caller_of(request)):
        body = await orchestrator.write_file(_uploaded(request, owner_of(edge, request)))
    return web.Response(body=body, content_type="application/json")


async def _uploaded(request: web.BaseRequest, owner: Owner) -> AsyncIterator[WriteFileRequest]:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    yield WriteFileRequest(owner=owner)
    fields: dict[str, str] = {}
    name: str | None = None
    try:
        form = await request.multipart()
        while (part := await form.next()) is not None:
            if not isinstance(part, aiohttp.BodyPartReader):
                raise invalid_argument("A part of the form must not be a form itself.", "file")
            if part.name != "file":
                text = bytes(await part.read_chunk(MAX_FIELD_BYTES))
                if not part.at_eof() and await part.read_chunk(1):
                    raise invalid_argument(f"{part.name} is too long.", part.name or "")
                fields[part.name or ""] = text.decode("utf-8", "replace")
                continue
            if name is not None:
                raise invalid_argument("There is more than one file.", "file")
            name = part.filename or ""
            while piece := await part.read_chunk(PIECE_BYTES):
                yield WriteFileRequest(piece=bytes(piece))
    except (ValueError, aiohttp.ClientError, web.RequestPayloadError) as error:
        raise invalid_argument(f"The form is malformed: {error}.", "file") from error
    yield WriteFileRequest(facts=_facts(name, fields))


def _facts(name: str | None, fields: dict[str, str]) -> FileFacts:
    if name is None:
        raise invalid_argument("file is missing.", "file")
    if "purpose" not in fields:
        raise invalid_argument("purpose is missing.", "purpose")
    seconds = fields.get(_SECONDS, "")
    if fields.get(_ANCHOR, "created_at") != "created_at":
        raise invalid_argument(f"{_ANCHOR} must be created_at.", _ANCHOR)
    if (seconds or _ANCHOR in fields) and not (seconds.isdecimal() and 0 < len(seconds) < 10):
        raise invalid_argument(f"{_SECONDS} must be a number of seconds.", _SECONDS)
    return FileFacts(filename=name, purpose=fields["purpose"], expires_after_seconds=int(seconds or 0))


async def get_content(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve GET /v1/files/{id}/content."""
    orchestrator = orchestrator_of(edge, request)
    file_id = request.path.split("/")[3][:MAX_ID_CHARS]
    with edge.admit(edge.callers.caller_of(request)):
        pieces = orchestrator.read_file(owner_of(edge, request), file_id)
        about = msgspec.json.decode((await anext(pieces)).body)
        response = web.StreamResponse(
            headers={"Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff"}
        )
        response.content_type, response.content_length = "application/octet-stream", about["bytes"]
        await response.prepare(request)
        async for message in pieces:
            await response.write(message.piece)
        await response.write_eof()
    return response
