"""One caller cannot take the places of all others at an edge, whatever it does with its requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from edge_http.admission import EdgeSettings
from kvloom_common.config import CallersConfig, KvloomConfig
from kvloom_common.limits.address_limit import AddressLimit
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import FakeRequest, answer
from tests.fakes.resume_world import CHAT, client
from tests.waiting import eventually

MAX_REQUESTS = 40
MAX_REQUESTS_PER_CALLER = 30
CONFIG = KvloomConfig(
    edge=EdgeSettings(max_concurrent_requests=MAX_REQUESTS, max_buffered_bytes=65_536),
    callers=CallersConfig(max_concurrent_requests=MAX_REQUESTS_PER_CALLER),
)


def raw_request(key: str, **fields: object) -> bytes:
    body = json.dumps(chat_body(**fields)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def unread_streams(world: EdgeWorld, count: int) -> AsyncIterator[list[FakeRequest]]:
    """That many streams with n=16, of which one client reads nothing."""
    streams = [await asyncio.open_connection(*world.address, limit=1024) for _ in range(count)]
    for _, writer in streams:
        writer.write(raw_request("attacker", stream=True, n=16))
    try:
        yield [await world.link.next_request() for _ in streams]
    finally:
        for _, writer in streams:
            writer.transport.abort()


async def test_unread_streams_leave_room_for_others() -> None:
    """300 unread streams made an edge refuse all other callers."""
    async with edge_world(CONFIG) as world, unread_streams(world, MAX_REQUESTS_PER_CALLER) as held:
        for request in held:
            request.start()
        headers = {"Authorization": "Bearer attacker"}
        async with world.http.post(world.url + CHAT, json=chat_body(n=16), headers=headers) as refused:
            assert refused.status == 429
            assert "Retry-After" in refused.headers
            error = (await refused.json())["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert "callers.max_concurrent_requests" in error["message"]
        world.link.script = answer("a")
        others = [world.post(CHAT, chat_body(), headers={"Authorization": f"Bearer {i}"}) for i in range(10)]
        assert [status for status, _ in await asyncio.gather(*others)] == [200] * 10


async def test_unread_streams_are_ended_and_their_places_are_free_again() -> None:
    """The bytes that wait for a reader are bounded, and so is the time for which it holds a place."""
    async with edge_world(CONFIG) as world, unread_streams(world, 4) as held:
        for request in held:
            for index in range(16):
                request.start(index)
        async with asyncio.timeout(20):
            while not all(request.cancelled.is_set() for request in held):
                for request in held:
                    request.tokens("x" * 16_384)
                await asyncio.sleep(0)
        await eventually(lambda: not world.edge.admission.num_running)
        assert world.edge.admission._num_running_by_caller == {}


async def test_places_of_an_abandoned_stream_are_the_callers() -> None:
    """A resumable answer runs without its client, so its caller's place remains taken."""
    config = KvloomConfig(callers=CallersConfig(max_concurrent_requests=1))
    async with edge_world(config) as world:
        first = client(world)
        reading = asyncio.create_task(first.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        await reading
        again = client(world)
        await again.begin(chat_body(stream=True))
        assert again.status == 429
        request.finish()
        await eventually(lambda: not world.edge.admission.num_running)
        world.link.script = answer("a")
        await again.begin(chat_body(stream=True))
        assert again.done


async def test_connections_of_one_address() -> None:
    """Inventing credentials costs nothing as long as they are not checked; a client has to own its address."""
    async with edge_world(KvloomConfig(callers=CallersConfig(max_connections_per_address=2))) as world:
        held = [await asyncio.open_connection(*world.address) for _ in range(2)]
        for reader, writer in held:  # so that they have been accepted
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" in await reader.readline()
        reader, writer = await asyncio.open_connection(*world.address)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ")
        assert b"Retry-After" in head
        assert json.loads(await reader.read())["error"]["code"] == "rate_limit_exceeded"
        writer.close()
        other_reader, other = await asyncio.open_connection(*world.address, local_addr=("127.0.0.2", 0))
        other.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in await other_reader.readline()
        for _, open_writer in (*held, (None, other)):
            open_writer.close()

        async def answers_again() -> bool:
            async with world.http.get(f"{world.url}/live") as response:
                return response.status == 200

        async with asyncio.timeout(5):
            while not await answers_again():  # noqa: ASYNC110  (there is no event for what the edge has noticed)
                await asyncio.sleep(0)


def test_networks_and_proxies() -> None:
    """A subscriber has a whole IPv6 network, and a proxy has many clients."""
    limit = AddressLimit(1, ["10.0.0.0/8"])
    assert limit.open("10.1.2.3") is limit.open("10.1.2.3") is limit.open("") is None
    counted = limit.open("2001:db8::1")
    assert counted is not None
    with pytest.raises(ValueError, match="too many"):
        limit.open("2001:db8::ffff:2")
    assert limit.open("2001:db8:0:1::1") is not None
    limit.close(counted)
    assert limit.open("2001:db8::ffff:2") == counted
    assert limit.open("::ffff:10.1.2.3") is None
