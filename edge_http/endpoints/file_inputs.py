"""Files that a request gives to the model: their texts stand in their places. The orchestrator has the stored ones, and
reads those that are no plain text."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import mimetypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from edge_http.anthropic.blocks import DocumentBlock, DocumentSource
from edge_http.anthropic.requests import MessagesTurn
from edge_http.endpoints.input_parts import FoundPart, ItemParts, blocks_with_source, chat_parts
from edge_http.fetching import UrlFetcher
from edge_http.openai.requests import Message
from edge_http.orchestrator_link import OrchestratorLink
from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.orchestrator_service_pb2 import Owner

MAX_FILES: Final = 32
READ_SECONDS: Final = 30.0
MAX_NAME_CHARS: Final = 128
MAX_FETCHED_BYTES: Final = 8 * 2**20
"""A file that is fetched from a URL has at most so many."""
_OF_CALLER: Final = (
    ErrorReason.ERROR_REASON_NOT_FOUND,
    ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
    ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE,
    ErrorReason.ERROR_REASON_UNSUPPORTED_PARAMETER,
)
_ITEM_KINDS: Final = ("input_file",)


class FileInput(NamedTuple):
    """A file, and where it stands."""

    at: str
    is_asked: bool
    """It is of the message by which the new turn asks for something."""
    given: Mapping[str, Any]
    """In the names of OpenAI's APIs: `file_id`, or `file_data` and `filename`."""
    set_text: Callable[[str], None]


async def read_chat_files(
    link: OrchestratorLink, owner: Owner, messages: Sequence[Message], fetcher: UrlFetcher
) -> None:
    """Raises KvloomError that names the field."""
    await _read(link, owner, list(_chat_files(messages)), fetcher)


def _chat_files(messages: Sequence[Message]) -> Iterator[FileInput]:
    for part, at, is_asked in chat_parts(messages, "file"):

        def set_text(text: str, part: Any = part) -> None:
            part.type, part.text = "text", text

        yield FileInput(at, is_asked, part.file or {}, set_text)


async def read_documents(
    link: OrchestratorLink, owner: Owner, messages: Sequence[MessagesTurn], fetcher: UrlFetcher
) -> None:
    """Raises KvloomError that names the field."""
    await _read(link, owner, list(_documents(messages)), fetcher)


def _documents(messages: Sequence[MessagesTurn]) -> Iterator[FileInput]:
    for block, at, is_asked in blocks_with_source(messages, DocumentBlock):
        yield from _document(block, at, is_asked=is_asked)


def _document(block: DocumentBlock, at: str, *, is_asked: bool) -> Iterator[FileInput]:
    source = block.source
    if source is None or source.type in ("text", "content"):
        return

    def set_text(text: str) -> None:
        block.source = DocumentSource(type="text", data=text)

    data = None if source.data is None else f"data:{source.media_type or ''};base64,{source.data}"
    given = {"file_id": source.file_id, "file_data": data, "file_url": source.url, "filename": block.title}
    yield FileInput(at, is_asked, given, set_text)


async def read_item_files(
    link: OrchestratorLink,
    owner: Owner,
    earlier: list[msgspec.Raw],
    given: str | list[msgspec.Raw],
    fetcher: UrlFetcher,
) -> tuple[list[msgspec.Raw], str | list[msgspec.Raw]]:
    """The items with the texts of files in them; the same ones if there are no files. Raises KvloomError that
    names the field."""
    items = ItemParts(earlier, given, _ITEM_KINDS)
    if not items.parts:
        return earlier, given
    await _read(link, owner, list(_item_files(items.parts)), fetcher)
    return items.encoded()


def _item_files(parts: Sequence[FoundPart]) -> Iterator[FileInput]:
    for part, at, is_asked in parts:

        def set_text(text: str, part: Any = part) -> None:
            part.clear()
            part.update(type="input_text", text=text)

        yield FileInput(at, is_asked, dict(part), set_text)


async def _read(link: OrchestratorLink, owner: Owner, files: Sequence[FileInput], fetcher: UrlFetcher) -> None:
    """Raises KvloomError, but a file of the history that cannot be read is left as it is, for the note that says so."""
    if not files:
        return
    if len(files) > MAX_FILES:
        raise invalid_argument(f"{files[MAX_FILES].at}: a request has at most {MAX_FILES} files.", files[MAX_FILES].at)
    fetcher = fetcher.of_request()
    for file in files:
        with naming(file.at, is_asked=file.is_asked):
            file.set_text(await _text_of(link, owner, file, fetcher))


@contextlib.contextmanager
def naming(at: str, *, is_asked: bool) -> Iterator[None]:
    """Makes errors of what is read within the context name its place. Of the history, what the caller is at fault for
    is no error: it is left out."""
    try:
        yield
    except KvloomError as error:
        if error.reason in _OF_CALLER and not is_asked:
            return
        if error.field.startswith(at):
            raise
        message = f"{at}: {error.message}"
        raise KvloomError(error.reason, message, field=at, retry_after_seconds=error.retry_after_seconds) from error


async def _text_of(link: OrchestratorLink, owner: Owner, file: FileInput, fetcher: UrlFetcher) -> str:
    """Raises KvloomError."""
    file_id, data, name, url = (file.given.get(field) for field in ("file_id", "file_data", "filename", "file_url"))
    if isinstance(url, str) and url and not (file_id or data):
        content, mime_type = await fetcher.fetch(url, file.at, MAX_FETCHED_BYTES)
        data = f"data:{mime_type};base64,{base64.b64encode(content).decode()}"
        name = name or PurePosixPath(urlsplit(url).path).name
    if isinstance(file_id, str) and file_id:
        answer = await link.operate(owner, "readFileText", [file_id], seconds=READ_SECONDS)
    elif isinstance(data, str) and data:
        kind, _, content = data.rpartition(",")
        mime_type = kind.removeprefix("data:").partition(";")[0]
        name = name if isinstance(name, str) and name else "file"
        if not mimetypes.guess_type(name)[0]:
            name += mimetypes.guess_extension(mime_type) or ""
        body = msgspec.json.encode({"filename": name, "data": content})
        answer = await link.operate(owner, "readFileText", [], body=body, seconds=READ_SECONDS)
    else:
        raise invalid_argument(f"{file.at} has neither a file_id nor a content.", file.at)
    found = msgspec.json.decode(answer, type=_FileText)
    return _attached(name if isinstance(name, str) and name else found.filename, found.text)


class _FileText(msgspec.Struct):
    filename: str
    text: str


def _attached(name: str, text: str) -> str:
    """The text between two marks, which nobody who wrote it knew: they depend on all of it."""
    name = " ".join(name.split())[:MAX_NAME_CHARS]
    mark = f"file-{hashlib.sha256(f'{name}/{text}'.encode()).hexdigest()[:16]}"
    return f"The file {name} is attached:\n<{mark}>\n{text.strip()}\n</{mark}>\n\n"
