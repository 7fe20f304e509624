"""A large answer is sent in small pieces, between which the event loop serves the others."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from edge_http.wire.fair_yield import FairYield
from edge_http.wire.large_body import PIECE_BYTES, cut, write_large_body


class Response:
    """Records in which turn of the event loop each piece was written."""

    content_length = 0

    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []
        self.body = b""
        self._turn = 0
        self.ended = False
        self._count()

    def _count(self) -> None:
        self._turn += 1
        if not self.ended:
            asyncio.get_running_loop().call_soon(self._count)

    async def prepare(self, _request: object) -> None:
        pass

    async def write(self, view: memoryview) -> None:
        self.written.append((self._turn, len(view)))
        self.body += view

    async def write_eof(self) -> None:
        self.ended = True


@given(st.lists(st.binary(max_size=50)), st.integers(1, 20))
def test_cutting_loses_nothing(pieces: list[bytes], max_bytes: int) -> None:
    """The pieces are the same bytes in the same order, and none is larger than the limit."""
    views = list(cut(pieces, max_bytes))
    assert b"".join(views) == b"".join(pieces)
    assert all(0 < len(view) <= max_bytes for view in views)


async def test_one_piece_in_a_turn_of_the_event_loop() -> None:
    """An answer of 45 MB held up every other stream for a second."""
    pieces = [b"[", bytearray(20 * PIECE_BYTES + 7), b"]"]
    one, two, fair_yield = Response(), Response(), FairYield()
    async with asyncio.timeout(10):
        await asyncio.gather(
            *(write_large_body(cast(Any, None), cast(Any, response), pieces, fair_yield) for response in (one, two))
        )
    for response in (one, two):
        assert response.body == b"".join(pieces)
        assert response.content_length == len(response.body)
        assert max(size for _, size in response.written) <= PIECE_BYTES
    turns = [turn for response in (one, two) for turn, _ in response.written]
    assert len(set(turns)) == len(turns)
