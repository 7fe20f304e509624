"""The object `response`, which is the body and part of the events that begin and end a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from edge_http.formatting.json_bytes import Buffer, Json, encode_json
from edge_http.formatting.response_formatter import Envelope, InlineResults
from edge_http.formatting.usage import Usage
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter", "steered": "steered"}
"""Maps the finish reasons of incomplete responses to OpenAI's words."""
_RATE_LIMITS: Final = frozenset(
    (
        ErrorReason.ERROR_REASON_RATE_LIMITED,
        ErrorReason.ERROR_REASON_QUEUE_FULL,
        ErrorReason.ERROR_REASON_BROWNOUT,
    )
)


class ResponseObject:
    """Makes the JSON of one response at any time of its life. `echo`: a JSON object, what it repeats of the request."""

    __slots__ = ("_echo", "_head")

    def __init__(self, envelope: Envelope, echo: bytes) -> None:
        self._head = encode_json(
            {"id": envelope.id, "object": "response", "created_at": envelope.created, "model": envelope.model}
        )[:-1]
        self._echo = echo[1:]

    def queued(self) -> bytes:
        return b"".join(self._pieces("queued", ()))

    def begun(self) -> bytes:
        return b"".join(self._pieces("in_progress", ()))

    def ended(
        self,
        finish_reason: str,
        output: Sequence[Buffer],
        usage: Usage,
        details: Json | None,
        moderation: InlineResults | None = None,
    ) -> list[Buffer]:
        """The pieces of a response whose output is whole, or was cut off."""
        incomplete = _INCOMPLETE.get(finish_reason)
        completed_at = int(time.time()) if incomplete is None else None
        return self._pieces(
            status_of(finish_reason),
            output,
            completed_at=completed_at,
            incomplete_details=None if incomplete is None else {"reason": incomplete},
            usage=usage_object(usage),
            details=details,
            moderation=None
            if moderation is None
            else {"input": _result(moderation.input), "output": _result(moderation.output)},
        )

    def failed(self, error: KvloomError, output: Sequence[Buffer]) -> bytes:
        return b"".join(self._pieces("failed", output, error=_error_object(error)))

    def _pieces(
        self,
        status: str,
        output: Sequence[Buffer],
        *,
        completed_at: int | None = None,
        error: Json | None = None,
        incomplete_details: Json | None = None,
        usage: Json | None = None,
        details: Json | None = None,
        moderation: Json | None = None,
    ) -> list[Buffer]:
        state: Json = {
            "status": status,
            "completed_at": completed_at,
            "error": error,
            "incomplete_details": incomplete_details,
            "usage": usage,
        }
        if details:
            state["kvloom"] = details
        if moderation:
            state["moderation"] = moderation
        before = b'%b,%b,"output":[' % (self._head, encode_json(state)[1:-1])
        return [before, *output, b"]," + self._echo]


def _result(results: Json) -> Json:
    """A response has one result where others have a list."""
    return results["results"][0] if "results" in results else results


def status_of(finish_reason: str) -> str:
    return "incomplete" if finish_reason in _INCOMPLETE else "completed"


def usage_object(usage: Usage) -> Json:
    """The API's `usage`. Nothing is charged for writing to the cache, so none of that is counted."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens or 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


def _error_object(error: KvloomError) -> Json:
    """OpenAI's `code` has few values; kvloom's own is the `type`."""
    code = "server_error"
    if error.reason in _RATE_LIMITS:
        code = "rate_limit_exceeded"
    elif error.reason == ErrorReason.ERROR_REASON_CONTENT_FILTERED:
        code = "invalid_prompt"
    return {
        "code": code,
        "message": error.message,
        "param": error.field or None,
        "type": error.kind.openai_code or error.kind.openai_type,
    }
