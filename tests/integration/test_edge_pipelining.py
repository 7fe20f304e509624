"""Requests that a client pipelines behind a running one are bounded, for its connection and for the whole edge."""

from __future__ import annotations

import asyncio
import json

from edge_http.admission import PENDING_BODIES
from edge_http.server.connection import MAX_PIPELINED_BYTES
from kvloom_common.config import EdgeConfig
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import answer
from tests.fakes.resume_world import CHAT
from tests.waiting import eventually

READ_BYTES = 256 * 2**10
"""The most that the event loop reads from a socket at a time."""


def raw_request(num_body_bytes: int = 0, **fields: object) -> bytes:
    body = json.dumps(chat_body(**fields)).encode()
    body += b" " * (num_body_bytes - len(body))
    return (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


async def begin(world: EdgeWorld) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose first request runs."""
    reader, writer = await asyncio.open_connection(*world.address)
    writer.write(raw_request())
    return reader, writer


async def test_pipelined_bodies_are_not_read_ahead() -> None:
    """32 bodies of 128 kB could wait in each connection, counted nowhere."""
    async with edge_world() as world:
        reader, writer = await begin(world)
        first = await world.link.next_request()
        for _ in range(30):
            writer.write(raw_request(100_000))
        await eventually(lambda: world.edge.admission.pipelined.num_bytes > MAX_PIPELINED_BYTES)
        sending = asyncio.create_task(writer.drain())
        for _ in range(50):
            await asyncio.sleep(0)
            assert world.edge.admission.pipelined.num_bytes <= MAX_PIPELINED_BYTES + READ_BYTES
        world.link.script = answer("a")
        first.start()
        first.tokens("a")
        first.finish()
        for _ in range(31):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
        await sending
        writer.close()
        await eventually(lambda: not world.edge.admission.pipelined.num_bytes)


async def test_all_pipelined_requests_of_an_address_are_bounded() -> None:
    """Many connections, each with a little behind a slow request, would add up to gigabytes."""
    config = EdgeConfig(max_body_bytes=4 * 2**20 // PENDING_BODIES)
    async with edge_world(config) as world:
        connections = [await begin(world) for _ in range(20)]
        running = [await world.link.next_request() for _ in connections]
        for _, writer in connections:
            writer.write(raw_request(60_000))
        await eventually(lambda: world.edge.metrics._requests.labels("connection", "429").total >= 10)
        assert 0 < world.edge.admission.pipelined.num_bytes <= 2**19
        world.link.script = answer("a")
        for request in running:
            request.start()
            request.tokens("a")
            request.finish()
        num_answers = []
        for reader, writer in connections:
            writer.write_eof()
            num_answers.append((await reader.read()).count(b"HTTP/1.1 200 "))
            writer.close()
        assert sorted(set(num_answers)) == [1, 2]
        assert num_answers.count(1) >= 10
        await eventually(lambda: not world.edge.admission.pipelined.num_leases)
        assert not world.edge.admission.pipelined.num_bytes
