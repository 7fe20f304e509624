"""A WebSocket of the Responses API sends messages of JSON, each of which is one frame of text.

Events of answers are written without a wait, as server-sent events are (sse.py), so that frames are made here:
aiohttp's own writer has to be awaited.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from edge_http.formatting.json_bytes import encode_json

SERVICE_RESTART: Final = 1012
POLICY_VIOLATION: Final = 1008
UNSUPPORTED_DATA: Final = 1003
"""Codes with which a connection is closed (RFC 6455, section 7.4)."""
LINGER_SECONDS: Final = 5.0
"""How long a client that reads too slowly may take for what was written, and for its part of the closing."""


def text_frame(data: bytes) -> bytes:
    """Return a frame of text, as a server sends it."""
    size = len(data)
    if size < 126:
        return b"\x81%c%b" % (size, data)
    if size < 2**16:
        return b"\x81\x7e%b%b" % (size.to_bytes(2, "big"), data)
    return b"\x81\x7f%b%b" % (size.to_bytes(8, "big"), data)


def close_frame(code: int) -> bytes:
    return b"\x88\x02" + code.to_bytes(2, "big")


def close_at_once(transport: asyncio.Transport, code: int) -> None:
    """Close a connection whose client reads too slowly to be waited for. A second call has no effect."""
    if not transport.is_closing():
        transport.write(close_frame(code))
        asyncio.get_running_loop().call_later(LINGER_SECONDS, transport.abort)


def write_message(transport: asyncio.Transport | None, message: dict[str, Any], max_buffered_bytes: int) -> None:
    """Send a message that is no event of an answer. A connection with too much that was not read is closed."""
    if transport is None or transport.is_closing():
        return
    if transport.get_write_buffer_size() > max_buffered_bytes:
        close_at_once(transport, POLICY_VIOLATION)
    else:
        transport.write(text_frame(encode_json(message)))


def error_message(
    error: dict[str, Any], stream_id: str | None, status: int | None = None, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the message that a request was refused, with the status and headers that it would have over HTTP."""
    message: dict[str, Any] = {"type": "error", "error": {**error, **({"headers": headers} if headers else {})}}
    if status is not None:
        message["status"] = status
    return message if stream_id is None else {**message, "stream_id": stream_id}
