"""Requests that are read after their clients have disconnected, because the edge was busy or has just started."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable

import pytest

from tests.fakes.edge_peers import edges, published
from tests.fakes.edge_world import EdgeWorld, chat_body
from tests.fakes.resume_world import CHAT
from tests.fakes.resuming_client import ResumingClient
from tests.waiting import eventually

_RESET: bytes = struct.pack("ii", 1, 0)
"""An SO_LINGER of zero seconds."""
KEY = "Idempotency-Key"


def send_and_leave(world: EdgeWorld, request: bytes, *, by_reset: bool) -> None:
    """The client disconnects before the edge has read its request."""
    with socket.create_connection(world.address, timeout=5.0) as connection:
        connection.sendall(request)
        if by_reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def num_connections(world: EdgeWorld) -> int:
    return len(world.server._connections.connections)


def get(streamed: ResumingClient) -> bytes:
    return _request(f"GET {CHAT}/{streamed.response_id}?stream=true&starting_after=1", streamed.headers, b"")


def post(streamed: ResumingClient) -> bytes:
    return _request(
        f"POST {CHAT}", {"x-kvloom-resume": "on", **streamed.headers}, json.dumps(chat_body(stream=True)).encode()
    )


def _request(line: str, headers: dict[str, str], body: bytes) -> bytes:
    head = [f"{line} HTTP/1.1", "Host: edge", *(f"{name}: {value}" for name, value in headers.items())]
    if body:
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, "", ""]).encode() + body


@pytest.mark.parametrize("by_reset", [True, False])
@pytest.mark.parametrize("again", [get, post])
@pytest.mark.parametrize("is_at_another", [True, False])
async def test_a_client_that_has_reconnected_keeps_the_stream(
    redis_url: str, is_at_another: bool, again: Callable[[ResumingClient], bytes], by_reset: bool
) -> None:
    """A client has reconnected when the request that it had sent over its broken connection is read. That request must
    not take the stream from it. (`kvloom-lab chaos` found it.)"""
    async with edges(redis_url) as ((first, peers), (second, _)):
        streamed = ResumingClient(first.url + CHAT, {"Authorization": "Bearer secret", KEY: "k"})
        reading = asyncio.create_task(streamed.begin(chat_body(stream=True)))
        request = await first.link.next_request()
        request.start()
        request.tokens("a")
        await published(peers)
        await eventually(lambda: len(streamed.events) > 1)
        late = second if is_at_another else first
        num_before = num_connections(late)
        send_and_leave(late, again(streamed), by_reset=by_reset)
        async with late.http.get(f"{late.url}/v1/models") as response:
            assert response.status == 200
        await eventually(lambda: num_connections(late) == num_before + 1)  # The other one was accepted before it.
        request.tokens("b")
        request.finish()
        await reading
        assert not streamed.notices
        assert streamed.done
