"""An edge that starts while clients wait at its door: a supervisor keeps the socket (`--listen-fd`), and what came to
it meanwhile is served first."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from edge_http.edge import ServedModel
from edge_http.process import Doors, serve_edge
from kvloom.config import KvloomConfig, RedisConfig
from tests.fakes.edge_peers import CHAT, left_by_a_dead_edge
from tests.fakes.fake_router_link import FakeRouterLink
from tests.fakes.tiny_tokenizer import model_tokenizer

NUM_WAITING = 16


@contextlib.asynccontextmanager
async def edge_process(redis: RedisConfig, doors: Doors) -> AsyncIterator[None]:
    """All of it but its router."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    model = ServedModel("tiny", model_tokenizer(), 1_700_000_000, "fp_test")
    config = KvloomConfig(redis=redis)
    serving = asyncio.create_task(
        serve_edge(config, FakeRouterLink(), model, doors, stop, lambda *address: ready.set_result(address))
    )
    try:
        await asyncio.wait_for(ready, 5)
        yield
    finally:
        stop.set()
        await asyncio.wait_for(serving, 10)


@pytest.mark.parametrize("peer_port", [None, 0])
async def test_who_waits_at_the_door_finds_what_a_dead_edge_left(redis_url: str, peer_port: int | None) -> None:
    """Requests that are there before the edge is must not meet one that does not know of the others yet: to it every
    answer but its own is unknown (404), which clients take as final."""
    redis = RedisConfig(url=redis_url, key_prefix=f"edge-start-{peer_port}")
    whole, _ = await left_by_a_dead_edge(redis)
    headers = ("Host: edge", "Authorization: Bearer secret", "Connection: close")
    asked = "\r\n".join((f"GET {CHAT}/{whole.response_id}?stream=true HTTP/1.1", *headers, "", ""))
    with socket.create_server(("127.0.0.1", 0), backlog=NUM_WAITING) as listener:
        waiting = [await asyncio.open_connection(*listener.getsockname()) for _ in range(NUM_WAITING)]
        for _, writer in waiting:
            writer.write(asked.encode())
        async with edge_process(redis, Doors(port=0, listen_fd=listener.dup().detach(), peer_port=peer_port)):
            answers = await asyncio.gather(*(reader.read() for reader, _ in waiting))
        for _, writer in waiting:
            writer.close()
            await writer.wait_closed()
    assert {text.partition(b"\r\n")[0] for text in answers} == {b"HTTP/1.1 200 OK"}
    assert all(b"data: [DONE]" in text for text in answers)
