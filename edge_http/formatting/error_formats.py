"""Errors in the JSON of each API, as a body and as the last event of a stream."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final, Protocol

from edge_http.formatting.json_bytes import encode_json
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

_ANTHROPIC_PATH: Final = "/v1/messages"
_RESPONSES_PATH: Final = "/v1/responses"
_SHARED_PATHS: Final = ("/v1/models", "/v1/files")
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_ANTHROPIC_OVERLOADED: Final = 529
"""Anthropic's status for what cannot be served now, where other APIs have 503."""
_TOO_LONG: Final = "prompt is too long"
"""Clients look for this in the message, and shorten their conversation."""
_NO_THREADS: Final = {"error_code": "thread_unsupported_request", "unsupported": []}
"""Tells Anthropic's tool runners, which ask for a thread by themselves, to send the whole conversation instead."""


class ErrorFormat(Protocol):
    """How an API reports errors."""

    def status(self, error: KvloomError) -> int:
        """The HTTP status of an error response."""
        ...

    def body(self, error: KvloomError, request_id: str = "") -> dict[str, Any]:
        """The JSON body of an error response."""
        ...

    def event(self, error: KvloomError, num_events: int = 0) -> bytes:
        """The server-sent event that ends a stream of so many events, without the blank line behind it."""
        ...


class _OpenAiErrors:
    def status(self, error: KvloomError) -> int:
        return error.kind.http_status

    def body(self, error: KvloomError, request_id: str = "") -> dict[str, Any]:  # noqa: ARG002
        return error.to_openai()

    def event(self, error: KvloomError, num_events: int = 0) -> bytes:  # noqa: ARG002
        return b"data: " + encode_json(error.to_openai())


class _AnthropicErrors:
    def status(self, error: KvloomError) -> int:
        status = error.kind.http_status
        return _ANTHROPIC_OVERLOADED if status == HTTPStatus.SERVICE_UNAVAILABLE else status

    def body(self, error: KvloomError, request_id: str = "") -> dict[str, Any]:
        status = self.status(error)
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        message = (
            f"{error.field}: {error.message}" if error.field and error.field not in error.message else error.message
        )
        if error.reason == ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED and _TOO_LONG not in message:
            message = f"{_TOO_LONG}: {message}"
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
        if error.reason == ErrorReason.ERROR_REASON_UNSUPPORTED_PARAMETER and error.field == "thread":
            body["error"]["details"] = _NO_THREADS
        return body | {"request_id": request_id} if request_id else body

    def event(self, error: KvloomError, num_events: int = 0) -> bytes:  # noqa: ARG002
        return b"event: error\ndata: " + encode_json(self.body(error))


class _ResponsesErrors(_OpenAiErrors):
    """OpenAI's, with the events of its Responses API."""

    def event(self, error: KvloomError, num_events: int = 0) -> bytes:
        event: dict[str, Any] = {"type": "error", "sequence_number": num_events}
        event |= {"code": error.kind.openai_code, "message": error.message, "param": error.field or None}
        return b"event: error\ndata: " + encode_json(event)


OPENAI_ERRORS: Final[ErrorFormat] = _OpenAiErrors()
RESPONSES_ERRORS: Final[ErrorFormat] = _ResponsesErrors()
ANTHROPIC_ERRORS: Final[ErrorFormat] = _AnthropicErrors()


def error_format_of(path: str, *, has_anthropic_version: bool = False) -> ErrorFormat:
    """The format of the API to which a path belongs. Both APIs have models and files; only Anthropic's clients send
    `anthropic-version`."""
    if path.startswith(_ANTHROPIC_PATH) or (has_anthropic_version and path.startswith(_SHARED_PATHS)):
        return ANTHROPIC_ERRORS
    return RESPONSES_ERRORS if path.startswith(_RESPONSES_PATH) else OPENAI_ERRORS
