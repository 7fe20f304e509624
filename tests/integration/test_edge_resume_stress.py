"""Resumable streams with clients that do not read, and with many clients that disconnect and return."""

from __future__ import annotations

import asyncio
import json
import random
import socket

import pytest

from edge_http.admission import EdgeSettings
from tests.fakes.edge_world import chat_body, edge_world
from tests.fakes.fake_router_link import FakeRequest
from tests.fakes.resume_world import CHAT, client, config, unattended
from tests.waiting import eventually


async def test_slow_reader_loses_its_connection_but_not_its_answer() -> None:
    """It is cut off like any slow reader, and can come back for the rest."""
    async with edge_world(EdgeSettings(max_buffered_bytes=64 * 1024)) as world:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, world.address)
        body = json.dumps(chat_body(stream=True)).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nx-kvloom-resume: on\r\n"
            f"Authorization: Bearer secret\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        await loop.sock_sendall(raw, head.encode() + body)
        request = await world.link.next_request()
        request.start()
        num_sent = 0
        (stream,) = world.edge.resume.streams.values()
        while stream.is_attended:
            request.tokens("x" * 1000)
            num_sent += 1
            assert num_sent < 3000, "the slow reader was never cut off"
            if num_sent % 10 == 0:
                await asyncio.sleep(0)
        received = b""
        async with asyncio.timeout(5):
            while piece := await loop.sock_recv(raw, 1 << 16):
                received += piece
        raw.close()
        last = received.split(b"\n\n")[-2]
        assert b"client_too_slow" in last
        assert b"id: " not in last.split(b"\r\n")[-1]  # its position is still that of the event before
        request.tokens("the end")
        request.finish()
        back = client(world)
        back.response_id = stream.name.id
        events = await back.read_to_the_end()
        assert len(events) == num_sent + 4  # opening, the last delta, finish, [DONE]
        assert not request.cancelled.is_set()


async def test_events_that_go_while_they_are_replayed() -> None:
    """A reader that is slower than the log forgets gets an error; it never gets an answer with a gap."""
    async with edge_world(config(max_response_bytes=16 * 2**20)) as world:
        dropped = client(world)
        begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        await begin
        await unattended(world)
        delta = "x" * 1000
        for _ in range(12_000):  # more than the kernel takes for a reader that does not read
            request.tokens(delta)
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, world.address)
        path = f"{CHAT}/{dropped.response_id}?stream=true&starting_after=1"
        await loop.sock_sendall(raw, f"GET {path} HTTP/1.0\r\nAuthorization: Bearer secret\r\n\r\n".encode())
        await unattended(world, 0)
        for _ in range(14_000):  # while it reads nothing
            request.tokens(delta)
        received = b""
        async with asyncio.timeout(10):
            while piece := await loop.sock_recv(raw, 1 << 16):
                received += piece
        raw.close()
        events = received.split(b"\r\n\r\n", 1)[1].split(b"\n\n")[:-1]
        numbers = [int(event.split(b"\n")[0][4:]) for event in events[:-1]]
        assert numbers == list(range(2, len(numbers) + 2))
        assert b"events_gone" in events[-1]
        assert not events[-1].startswith(b"id:")


async def test_reader_that_is_stuck_in_a_replay_harms_no_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead connection is cut off after some time. By then the client has returned on another connection, which must
    not be affected."""
    monkeypatch.setattr("edge_http.resume.resumable_stream.CATCH_UP_SECONDS", 0.1)
    async with edge_world(config(max_response_bytes=32 * 2**20)) as world:
        dropped = client(world)
        begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        await begin
        await unattended(world)
        for _ in range(12_000):
            request.tokens("x" * 1000)
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stuck, world.address)
        path = f"{CHAT}/{dropped.response_id}?stream=true"
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n"
        await loop.sock_sendall(stuck, head.encode())
        await unattended(world, 0)
        back = asyncio.create_task(dropped.resume())
        await eventually(lambda: len(dropped.events) == 12_001)
        await asyncio.sleep(0.2)  # sleep: the stuck one's time is over
        request.tokens("live")
        request.finish()
        assert await back == 200
        assert dropped.done
        assert not dropped.notices
        stuck.close()


async def test_stuck_reader_of_a_replay_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that reads nothing does not count as a client for ever."""
    monkeypatch.setattr("edge_http.resume.resumable_stream.CATCH_UP_SECONDS", 0.05)
    async with edge_world(config(max_response_bytes=32 * 2**20, grace_seconds=0.1)) as world:
        dropped = client(world)
        dropped.headers["Idempotency-Key"] = "k"
        begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        for _ in range(12_000):
            request.tokens("x" * 1000)
        await begin
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stuck, world.address)
        path = f"{CHAT}/{dropped.response_id}?stream=true"
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n"
        await loop.sock_sendall(stuck, head.encode())
        async with asyncio.timeout(5):
            await request.cancelled.wait()
        await eventually(lambda: not world.edge.resume.streams)
        stuck.close()


async def test_nothing_is_left_when_all_clients_are_gone() -> None:
    """Hundreds of clients disconnect, return, take over, cancel or never come back: no permit, task, byte or request in
    the fabric is left behind."""
    async with edge_world(
        config(grace_seconds=0.1, max_unattended=20, max_bytes=400_000, idempotency_seconds=0.1)
    ) as world:
        rng = random.Random(7)

        async def generate(request: FakeRequest) -> None:
            request.start()
            for i in range(rng.randrange(1, 60)):
                request.tokens(f"{i} " * rng.randrange(20))
                await asyncio.sleep(0.002 * rng.random())  # sleep: the pace of tokens
            request.finish()

        async def one() -> str:
            streamed = client(world)
            if rng.random() < 0.3:
                streamed.headers["Idempotency-Key"] = f"key-{rng.randrange(10**9)}"
            await streamed.begin(chat_body(stream=True), stop_after=rng.randrange(10))
            while rng.random() < 0.7 and not streamed.done and streamed.status == 200:
                await asyncio.sleep(0.02 * rng.random())  # sleep: the pace of clients
                await streamed.resume(stop_after=len(streamed.events) + rng.randrange(20))
            if rng.random() < 0.2:
                async with world.http.post(
                    f"{world.url}{CHAT}/{streamed.response_id}/cancel", headers=streamed.headers
                ) as response:
                    assert response.status in (200, 404)
            return "done" if streamed.done else str(streamed.status)

        generating: list[asyncio.Task[None]] = []
        world.link.script = lambda request: generating.append(asyncio.create_task(generate(request)))
        outcomes = []
        for _ in range(10):
            outcomes += await asyncio.gather(*(one() for _ in range(30)))
        await asyncio.gather(*generating)
        assert {"done", "200"} <= set(outcomes) <= {"done", "200", "204", "404", "410"}
        resume = world.edge.resume
        await eventually(lambda: not resume.streams)
        kept = resume._retention
        assert kept.num_bytes == 0
        assert not any((resume._jobs, kept._running, kept._left, kept._ended, resume._by_key))
        assert world.edge.admission.num_running == 0
        assert len(world.link.requests) == 300
