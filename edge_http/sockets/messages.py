"""The messages of a client, and errors that concern nothing else."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from edge_http.formatting.json_bytes import Json
from kvloom.errors import invalid_argument, unsupported

_STREAM_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_NULL: Final = b"null"
_OF_MESSAGE: Final = ("type", "stream_id", "generate")
"""Fields of `response.create` that are none of a response."""


class SocketError(Exception):
    """A message that is refused with a code of the WebSocket alone."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.error: Json = {"type": "invalid_request_error", "code": code, "message": message, "param": param}


class _UserMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user"]
    content: str | list[dict[str, Any]]
    type: Literal["message"] = "message"


class SteerMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A client's `response.steer`."""

    type: Literal["response.steer"]
    previous_response_id: str
    input: str | Annotated[list[_UserMessage], msgspec.Meta(min_length=1)]


@dataclasses.dataclass(slots=True)
class Steer:
    """User messages that a response is to be continued with."""

    previous_response_id: str
    input: msgspec.Raw
    """The JSON that the client has sent."""
    id: str = dataclasses.field(default_factory=lambda: f"steer_{os.urandom(24).hex()}")

    @property
    def named(self) -> Json:
        return {"id": self.id, "previous_response_id": self.previous_response_id}


@dataclasses.dataclass(slots=True)
class Create:
    """A client's `response.create`, or what the fabric makes out of a `response.steer`."""

    fields: dict[str, msgspec.Raw]
    """The fields of the body of POST /v1/responses."""
    stream_id: str | None
    generates: bool = True
    steers: Sequence[Steer] = ()
    """Their messages come before its input."""
    num_bytes: int = 0

    @property
    def previous_response_id(self) -> str:
        return text_of(self.fields.get("previous_response_id"))

    def input_items(self) -> list[msgspec.Raw]:
        """All that it adds to the conversation."""
        inputs = (*(steer.input for steer in self.steers), self.fields.get("input"))
        return [item for given in inputs for item in items_of(given)]


def text_of(raw: msgspec.Raw | None) -> str:
    """The text of a field; "" if it has none."""
    value = None if raw is None else msgspec.json.decode(raw)
    return value if isinstance(value, str) else ""


def items_of(given: msgspec.Raw | None) -> list[msgspec.Raw]:
    """An input as items. What is none is left to the handler, which names what is wrong."""
    if given is None:
        return []
    if bytes(given).lstrip().startswith(b"["):
        return msgspec.json.decode(given, type=list[msgspec.Raw])
    value = msgspec.json.decode(given)
    return [raw({"type": "message", "role": "user", "content": value})] if value else []


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def read_create(fields: dict[str, msgspec.Raw], num_bytes: int) -> Create:
    """Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER), SocketError."""
    stream_id, generates, background = (
        msgspec.json.decode(fields.get(name, _NULL)) for name in ("stream_id", "generate", "background")
    )
    if stream_id is not None and not (isinstance(stream_id, str) and _STREAM_ID.fullmatch(stream_id)):
        message = "stream_id must have 1 to 256 ASCII letters, digits, hyphens, underscores and periods."
        raise SocketError("invalid_stream_id", message, "stream_id")
    if generates not in (None, True, False):
        raise invalid_argument("generate must be true or false.", "generate")
    if background:
        raise unsupported("background is not supported over WebSocket: use POST /v1/responses.", "background")
    body = {name: value for name, value in fields.items() if name not in _OF_MESSAGE}
    return Create(body, stream_id, generates is not False, num_bytes=num_bytes)
