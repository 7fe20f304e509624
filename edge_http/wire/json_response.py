"""JSON responses, including errors."""

from __future__ import annotations

import math
from typing import Any, Final

from aiohttp import web

from edge_http.formatting.error_formats import OPENAI_ERRORS, ErrorFormat
from edge_http.formatting.json_bytes import encode_json
from edge_http.wire.headers import RETRY_AFTER, RETRY_AFTER_MS, SHOULD_RETRY, reason
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

_REST_IS_NOT_READ: Final = (
    ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE,
    ErrorReason.ERROR_REASON_UNSUPPORTED_TRANSFER_CODING,
)
_RETRY_IS_IN_VAIN: Final = frozenset(
    (
        ErrorReason.ERROR_REASON_BUDGET_EXHAUSTED,
        ErrorReason.ERROR_REASON_DEADLINE_IMPOSSIBLE,
        ErrorReason.ERROR_REASON_NOT_IMPLEMENTED,
        ErrorReason.ERROR_REASON_UNSUPPORTED_HTTP_VERSION,
        ErrorReason.ERROR_REASON_UNSUPPORTED_TRANSFER_CODING,
    )
)
"""OpenAI's and Anthropic's clients repeat every 429 and 5xx otherwise."""


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=encode_json(body), status=status, content_type="application/json")


def error_response(error: KvloomError, error_format: ErrorFormat = OPENAI_ERRORS, request_id: str = "") -> web.Response:
    response = json_response(error_format.body(error, request_id), error_format.status(error))
    if error.retry_after_seconds > 0:
        response.headers[RETRY_AFTER] = str(math.ceil(error.retry_after_seconds))
        response.headers[RETRY_AFTER_MS] = str(round(error.retry_after_seconds * 1e3))  # OpenAI's clients read this one
    response.headers.update(reason(error))
    if error.reason in _RETRY_IS_IN_VAIN:
        response.headers[SHOULD_RETRY] = "false"
    if error.reason == ErrorReason.ERROR_REASON_UNAUTHENTICATED:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.reason in _REST_IS_NOT_READ:
        response.force_close()  # the rest of the request need not be read
    return response
