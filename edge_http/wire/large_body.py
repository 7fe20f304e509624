"""Writes a response body of many megabytes without holding up the event loop, and without a copy of the whole body."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

from aiohttp import web

from edge_http.wire.fair_yield import FairYield

PIECE_BYTES: Final = 64 * 2**10
RESPONSE_SECONDS: Final = 60.0
"""The client must receive a complete response within this time. Streams have limits of their own."""


def cut(pieces: Sequence[bytes | bytearray], max_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """Yield the bytes of all pieces, in order, in views of at most `max_bytes`."""
    for piece in pieces:
        view = memoryview(piece)
        for begin in range(0, len(view), max_bytes):
            yield view[begin : begin + max_bytes]


async def write_large_body(
    request: web.BaseRequest,
    response: web.StreamResponse,
    pieces: Sequence[bytes | bytearray],
    fair_yield: FairYield,
) -> None:
    """Send the response's head and its body, of which at most PIECE_BYTES are written in an iteration of the event
    loop. The connection is closed if the client does not take the body in time."""
    response.content_length = sum(map(len, pieces))
    try:
        async with asyncio.timeout(RESPONSE_SECONDS):
            await response.prepare(request)
            for view in cut(pieces):
                await fair_yield.take(PIECE_BYTES)
                await response.write(view)
            await response.write_eof()
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client reads too slowly") from error
