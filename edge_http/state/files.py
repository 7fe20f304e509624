"""Files as streams, of which no process has more than a piece: POST /v1/files, POST /v1/uploads/{id}/parts and
GET /v1/files/{id}/content."""

from __future__ import annotations

import contextlib
import mimetypes
import re
from collections.abc import AsyncIterator, Callable
from typing import Final

import aiohttp
import msgspec
from aiohttp import web

from edge_http.anthropic.requests import check_version
from edge_http.edge import Edge
from edge_http.endpoints.ownership import owner_of
from edge_http.openapi.route import Handler
from edge_http.state.handler import MAX_ID_CHARS, operating, orchestrator_of
from edge_http.wire.headers import ANTHROPIC_REQUEST_ID, ANTHROPIC_VERSION, is_anthropic, request_id
from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.orchestrator_service_pb2 import FileFacts, WriteFileRequest

MAX_FIELD_BYTES: Final = 4096
PIECE_BYTES: Final = 256 * 2**10
_ANCHOR: Final = "expires_after[anchor]"
_SECONDS: Final = "expires_after[seconds]"
_OF_ANTHROPIC: Final = "expires_in_seconds"
_MIME_TYPE: Final = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,63}/[a-z0-9][a-z0-9!#$&^_.+-]{0,127}")


class _Form:
    """The form of a request, of which one part is a content."""

    def __init__(self, request: web.BaseRequest, content: str) -> None:
        """`content`: the name of that part. Raises KvloomError (UNSUPPORTED_MEDIA_TYPE)."""
        if request.content_type != "multipart/form-data":
            message = "A file must be sent with Content-Type: multipart/form-data."
            raise KvloomError(ErrorReason.ERROR_REASON_UNSUPPORTED_MEDIA_TYPE, message)
        self._request = request
        self._content = content
        self.filename: str | None = None
        """None until the content comes."""
        self.mime_type = ""
        self.fields: dict[str, str] = {}

    async def pieces(self) -> AsyncIterator[bytes]:
        """The content. All else of the form is known when it has ended. Raises KvloomError (INVALID_ARGUMENT)."""
        try:
            form = await self._request.multipart()
            while (part := await form.next()) is not None:
                if not isinstance(part, aiohttp.BodyPartReader):
                    raise invalid_argument("A part of the form must not be a form itself.", self._content)
                if part.name != self._content:
                    await self._add_field(part)
                    continue
                if self.filename is not None:
                    raise invalid_argument(f"There is more than one {self._content}.", self._content)
                self.filename = part.filename or ""
                given = part.headers.get("Content-Type", "").partition(";")[0].strip().lower()
                self.mime_type = given if _MIME_TYPE.fullmatch(given) else ""
                while piece := await part.read_chunk(PIECE_BYTES):
                    yield bytes(piece)
        except (ValueError, aiohttp.ClientError, web.RequestPayloadError) as error:
            raise invalid_argument(f"The form is malformed: {error}.", self._content) from error
        if self.filename is None:
            raise invalid_argument(f"{self._content} is missing.", self._content)

    async def _add_field(self, part: aiohttp.BodyPartReader) -> None:
        text = bytes(await part.read_chunk(MAX_FIELD_BYTES))
        if not part.at_eof() and await part.read_chunk(1):
            raise invalid_argument(f"{part.name} is too long.", part.name or "")
        self.fields[part.name or ""] = text.decode("utf-8", "replace")


async def create_file(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/files."""
    orchestrator_of(edge, request)
    form = _Form(request, "file")
    return await _write(edge, request, form, _anthropic_facts if is_anthropic(request) else _facts)


async def create_part(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/uploads/{id}/parts."""
    orchestrator_of(edge, request)
    upload_id = request.path.split("/")[3][:MAX_ID_CHARS]
    return await _write(edge, request, _Form(request, "data"), lambda _: _PART, upload_id)


async def _write(
    edge: Edge, request: web.BaseRequest, form: _Form, facts_of: Callable[[_Form], FileFacts], upload_id: str = ""
) -> web.StreamResponse:
    owner = owner_of(edge, request)

    async def requests() -> AsyncIterator[WriteFileRequest]:
        yield WriteFileRequest(owner=owner, upload_id=upload_id)
        async for piece in form.pieces():
            yield WriteFileRequest(piece=piece)
        yield WriteFileRequest(facts=facts_of(form))

    with edge.admission.admit(edge.callers.caller_of(request)):
        body = await orchestrator_of(edge, request).write_file(requests())
    return web.Response(body=body, content_type="application/json")


_PART: Final = FileFacts(filename="part", purpose="user_data")


def _facts(form: _Form) -> FileFacts:
    fields = form.fields
    if "purpose" not in fields:
        raise invalid_argument("purpose is missing.", "purpose")
    if fields.get(_ANCHOR, "created_at") != "created_at":
        raise invalid_argument(f"{_ANCHOR} must be created_at.", _ANCHOR)
    seconds = 0
    if fields.get(_SECONDS, "") or _ANCHOR in fields:
        seconds = _number_of_seconds(form, _SECONDS)
    return FileFacts(
        filename=form.filename or "",
        purpose=fields["purpose"],
        expires_after_seconds=seconds,
        mime_type=form.mime_type,
    )


def _anthropic_facts(form: _Form) -> FileFacts:
    """The facts of a file without a purpose, whose name may be missing."""
    seconds = _number_of_seconds(form, _OF_ANTHROPIC) if _OF_ANTHROPIC in form.fields else 0
    name = re.split(r"[/\\]", form.filename or "")[-1]
    return FileFacts(
        filename=name or f"unnamed{mimetypes.guess_extension(form.mime_type) or ''}",
        purpose="user_data",
        expires_after_seconds=seconds,
        mime_type=form.mime_type,
        of_anthropic=True,
    )


def _number_of_seconds(form: _Form, field: str) -> int:
    given = form.fields.get(field, "")
    if not (given.isdecimal() and given.isascii() and 0 < len(given) < 10):
        raise invalid_argument(f"{field} must be a number of seconds.", field)
    return int(given)


def in_either_shape(operation: str, of_anthropic: str, path: str) -> Handler:
    """The handler of a path that both APIs have: the client's `anthropic-version` says which operation it is."""
    as_openai, as_anthropic = operating(operation, path), operating(of_anthropic, path)

    async def operate(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
        if not is_anthropic(request):
            return await as_openai(edge, request)
        check_version(request.headers.get(ANTHROPIC_VERSION))
        response = await as_anthropic(edge, request)
        response.headers[ANTHROPIC_REQUEST_ID] = request_id(request)
        return response

    return operate


async def get_content(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve GET /v1/files/{id}/content."""
    orchestrator = orchestrator_of(edge, request)
    file_id = request.path.split("/")[3][:MAX_ID_CHARS]
    with edge.admission.admit(edge.callers.caller_of(request)):
        async with contextlib.aclosing(orchestrator.read_file(owner_of(edge, request), file_id)) as pieces:
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
