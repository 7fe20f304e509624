"""An edge that starts while clients wait: a supervisor keeps the socket (`--listen-fd`), and connections that it
received meanwhile are served first."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest

from edge_http.server.process import EdgeListenOptions, serve_edge
from kvloom.v1.router_service_pb2 import FleetState
from kvloom_common.config import KvloomConfig, RedisConfig
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.process import service
from tests.fakes.edge_peers import left_by_a_dead_edge
from tests.fakes.fake_router_link import FakeRouterLink, answer
from tests.fakes.resume_world import CHAT
from tests.fakes.served_models import tiny_model
from tests.waiting import eventually

NUM_WAITING = 16


@contextlib.asynccontextmanager
async def edge_process(
    redis: RedisConfig, listen_options: EdgeListenOptions, link: FakeRouterLink | None = None
) -> AsyncIterator[asyncio.Future[tuple[str, str]]]:
    """Runs all of an edge's process except its router, and yields its address once it can be reached."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    config = KvloomConfig(redis=redis)
    serving = asyncio.create_task(
        serve_edge(
            config,
            link or FakeRouterLink(),
            Catalogue([tiny_model()]),
            listen_options,
            stop,
            lambda *address: ready.set_result(address),
        )
    )
    try:
        if link is None:
            await asyncio.wait_for(ready, 5)
        yield ready
    finally:
        stop.set()
        await asyncio.wait_for(serving, 10)


@pytest.mark.parametrize("peer_port", [None, 0])
async def test_clients_that_wait_for_the_start_find_the_answers_of_a_dead_edge(
    redis_url: str, peer_port: int | None
) -> None:
    """Requests that wait for the edge must not be served before it knows the other edges: until then every answer but
    its own is unknown to it (404), which clients take as final."""
    redis = RedisConfig(url=redis_url, key_prefix=f"edge-start-{peer_port}")
    whole, _ = await left_by_a_dead_edge(redis)
    headers = ("Host: edge", "Authorization: Bearer secret", "Connection: close")
    asked = "\r\n".join((f"GET {CHAT}/{whole.response_id}?stream=true HTTP/1.1", *headers, "", ""))
    with socket.create_server(("127.0.0.1", 0), backlog=NUM_WAITING) as listener:
        waiting = [await asyncio.open_connection(*listener.getsockname()) for _ in range(NUM_WAITING)]
        for _, writer in waiting:
            writer.write(asked.encode())
        async with edge_process(
            redis, EdgeListenOptions(port=0, listen_fd=listener.dup().detach(), peer_port=peer_port)
        ):
            answers = await asyncio.gather(*(reader.read() for reader, _ in waiting))
        for _, writer in waiting:
            writer.close()
            await writer.wait_closed()
    assert {text.partition(b"\r\n")[0] for text in answers} == {b"HTTP/1.1 200 OK"}
    assert all(b"data: [DONE]" in text for text in answers)


def chat_request() -> bytes:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: edge\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("peer_port", [None, 0])
async def test_clients_that_wait_for_the_start_are_served_by_shards_that_appear(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, peer_port: int | None
) -> None:
    """A new edge finds its router and shards some milliseconds later. Earlier requests would be rejected although
    nothing is wrong."""
    monkeypatch.setattr(service, "OPEN_SECONDS", 60.0)
    link = FakeRouterLink()
    link.script = answer("yes")
    fleet = link.fleet
    link.tell(FleetState(), connected=False)
    redis = RedisConfig(url=redis_url, key_prefix=f"edge-start-shards-{peer_port}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(chat_request())
        listen_options = EdgeListenOptions(port=0, listen_fd=listener.dup().detach(), peer_port=peer_port)
        async with edge_process(redis, listen_options, link) as ready:
            # So does the follower of successors, whether or not the edge is open.
            await eventually(lambda: link.num_waits == 2, "the edge waits")
            link.tell(FleetState())  # the router, and no shard
            await eventually(lambda: link.num_waits == 4, "the edge waits on")
            assert not ready.done()
            link.tell(fleet)
            await asyncio.wait_for(ready, 5)
            text = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert text.startswith(b"HTTP/1.1 200 OK")


async def test_an_edge_opens_without_a_router_too(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens later than with a router, and clients get the reason why it cannot serve."""
    monkeypatch.setattr(service, "OPEN_SECONDS", 0.01)
    link = FakeRouterLink()
    link.tell(FleetState(), connected=False)
    redis = RedisConfig(url=redis_url, key_prefix="edge-start-alone")
    async with edge_process(redis, EdgeListenOptions(port=0), link) as ready:
        address, *_ = await asyncio.wait_for(ready, 5)
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(chat_request())
        text = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert text.startswith(b"HTTP/1.1 503 ")
    assert b"router_unavailable" in text
