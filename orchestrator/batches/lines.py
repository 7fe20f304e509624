"""The lines of an input file: which are valid, and where they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

MAX_LINES: Final = 50_000
MAX_ERRORS: Final = 100
"""A batch tells of at most so many errors."""
MAX_ID_CHARS: Final = 512


class Line(NamedTuple):
    number: int
    """From 1."""
    custom_id: str
    offset: int
    num_bytes: int
    beginnings: Sequence[bytes] = ()
    """Digests of beginnings of what its prompt is made of, the shortest first."""


class LineError(NamedTuple):
    code: str
    message: str
    line: int | None
    param: str | None


class _Given(msgspec.Struct):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


_DECODER: Final = msgspec.json.Decoder(_Given)
_OF_PROMPT: Final = ("model", "tools", "system", "instructions", "messages", "input", "prompt")
"""The fields of which a prompt is made, about in the order in which templates write them."""
_BEGINNING_BYTES: Final = (256, 1024, 4096, 16_384)
_DIGEST_BYTES: Final = 8


class LineReader:
    """Takes an input file piece by piece; `lines` and `errors` have what was found after `finish`."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._rest = b""
        self._offset = 0
        self._number = 0
        self._ids: set[str] = set()
        self.lines: list[Line] = []
        self.errors: list[LineError] = []

    def feed(self, piece: bytes) -> None:
        *whole, self._rest = (self._rest + piece).split(b"\n")
        for line in whole:
            self._read(line, 1)

    def finish(self) -> None:
        self._read(self._rest, 0)
        self._rest = b""
        if not self.lines and not self.errors:
            self.errors.append(LineError("empty_file", "The input file has no line.", None, None))

    def _read(self, line: bytes, num_more: int) -> None:
        offset, self._offset = self._offset, self._offset + len(line) + num_more
        if not line.strip():
            return
        self._number += 1
        if self._number > MAX_LINES:
            if self._number == MAX_LINES + 1:
                self._note("too_many_lines", f"A batch has at most {MAX_LINES} lines.", None)
            return
        try:
            given = _DECODER.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._note("invalid_json_line", f"The line is not a request: {error}.", None)
            return
        if given.url != self._endpoint:
            self._note("mismatched_endpoint", f"url must be the batch's endpoint, {self._endpoint}.", "url")
        elif given.custom_id in self._ids:
            self._note("duplicate_custom_id", "Another line has this custom_id.", "custom_id")
        elif not 0 < len(given.custom_id) <= MAX_ID_CHARS:
            self._note("invalid_custom_id", f"custom_id must have 1 to {MAX_ID_CHARS} characters.", "custom_id")
        elif given.body.get("stream"):
            self._note("invalid_request", "A line of a batch is not streamed.", "body.stream")
        else:
            self._ids.add(given.custom_id)
            beginnings = beginnings_of(given.body)
            self.lines.append(Line(self._number, given.custom_id, offset, len(line), beginnings))

    def _note(self, code: str, message: str, param: str | None) -> None:
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(LineError(code, message, self._number, param))


def beginnings_of(body: Mapping[str, Any]) -> Sequence[bytes]:
    """Digests of the first bytes of what a prompt is made of: two prompts have as many in common as they share."""
    parts = msgspec.json.encode([body.get(name) for name in _OF_PROMPT])
    return [hashlib.blake2b(parts[:size], digest_size=_DIGEST_BYTES).digest() for size in _BEGINNING_BYTES]


def in_turn(lines: Sequence[Line]) -> list[Line]:
    """The lines in the order in which they are answered: those whose prompts begin alike come one after the other, so
    that the prefix cache still has what they share. Groups, and the lines of each, have the order of the file."""
    firsts: dict[Sequence[bytes], int] = {}
    for line in lines:
        for size in range(1, len(line.beginnings) + 1):
            firsts.setdefault(tuple(line.beginnings[:size]), line.number)
    sizes = range(1, len(_BEGINNING_BYTES) + 1)
    return sorted(lines, key=lambda line: (*(firsts[tuple(line.beginnings[:size])] for size in sizes), line.number))


def request_body(line: bytes, endpoint: str) -> bytes:
    """The body that is sent to an edge: it waits for idle capacity."""
    body = _DECODER.decode(line).body
    if endpoint != "/v1/embeddings":
        body["service_tier"] = "flex"
    return msgspec.json.encode(body)


def result_of(batch_id: str, line: int, custom_id: str, response: Any, error: Any) -> bytes:
    """A line of the output or of the error file."""
    name = f"batch_req_{batch_id.removeprefix('batch_')}_{line}"
    return msgspec.json.encode({"id": name, "custom_id": custom_id, "response": response, "error": error})
