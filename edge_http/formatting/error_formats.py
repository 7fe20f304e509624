"""Errors in the JSON of each API, as a body and as the last event of a stream."""

from __future__ import annotations

from typing import Any, Final, Protocol

from edge_http.formatting.json_bytes import encode_json
from kvloom.errors import KvloomError

_ANTHROPIC_PATH: Final = "/v1/messages"
_RESPONSES_PATH: Final = "/v1/responses"
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorFormat(Protocol):
    """How an API reports errors."""

    def body(self, error: KvloomError) -> dict[str, Any]:
        """The JSON body of an error response."""
        ...

    def event(self, error: KvloomError, num_events: int = 0) -> bytes:
        """The server-sent event that ends a stream of so many events, without the blank line behind it."""
        ...


class _OpenAiErrors:
    def body(self, error: KvloomError) -> dict[str, Any]:
        return error.to_openai()

    def event(self, error: KvloomError, num_events: int = 0) -> bytes:  # noqa: ARG002
        return b"data: " + encode_json(error.to_openai())


class _AnthropicErrors:
    def body(self, error: KvloomError) -> dict[str, Any]:
        status = error.kind.http_status
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        message = (
            f"{error.field}: {error.message}" if error.field and error.field not in error.message else error.message
        )
        return {"type": "error", "error": {"type": kind, "message": message}}

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


def error_format_of(path: str) -> ErrorFormat:
    """The format of the API to which a path belongs."""
    if path.startswith(_ANTHROPIC_PATH):
        return ANTHROPIC_ERRORS
    return RESPONSES_ERRORS if path.startswith(_RESPONSES_PATH) else OPENAI_ERRORS
