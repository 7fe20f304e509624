"""The load client of `kvloom-lab bench data-plane` reads what any gateway sends."""

from __future__ import annotations

import asyncio

import pytest

from lab.bench.data_plane.load import Load, LoadConnection, Order
from lab.bench.data_plane.workloads import Workload

ONCE = Workload(name="once", about="", num_streams=1, num_requests=1, num_tokens=1, step_ms=0.0)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"delta":{"content":" word"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Written(asyncio.Transport):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        pass


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def outcome(pieces: list[bytes]) -> tuple[int, int]:
    """Answers that were complete, and errors, of one that is read in these pieces."""
    order = Order(host="", port=0, model="model", model_path="", workload=ONCE, seed=1, pids={})
    load = Load(order, {})
    connection = LoadConnection(load)
    connection.connection_made(Written())
    connection.send_next()
    for piece in pieces:
        connection.data_received(piece)
    return load.num_complete, load.errors.total()


@pytest.mark.parametrize("cut", range(len(DONE) + 1))
async def test_an_answer_may_be_cut_into_chunks_and_reads_anywhere(cut: int) -> None:
    """Proxies do not keep to events: an answer that came whole must not count as broken off."""
    parts = [part for part in (DONE[:cut], DONE[cut:]) if part]
    body = chunk(TOKEN) + b"".join(map(chunk, parts)) + chunk(b"")
    for end in range(len(body) + 1):
        assert await outcome([HEAD + body[:end], body[end:]]) == (1, 0), end
    assert await outcome([HEAD, *(body[i : i + 1] for i in range(len(body)))]) == (1, 0)


async def test_an_answer_without_its_end_is_broken_off() -> None:
    """A gateway that ends a stream early must not look fast."""
    assert await outcome([HEAD + chunk(TOKEN) + chunk(b"")]) == (0, 1)
