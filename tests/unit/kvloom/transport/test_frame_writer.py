"""Pending messages of a stream are sent as one per loop iteration, in order, and wait for a peer that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvloom.transport.frame_writer import FrameWriter
from kvloom.transport.local_client import connect_local
from kvloom.transport.local_stream import LocalStream
from kvloom.v1.router_service_pb2 import RouterServiceConnectRequest, RouterServiceConnectResponse
from kvloom_common.transport.local_server import LocalServer
from tests.waiting import eventually


class Pile:
    """Pending texts, of which a message holds at most `max_texts`."""

    def __init__(self, max_texts: int = 1000) -> None:
        self.texts: list[str] = []
        self.writer: FrameWriter[RouterServiceConnectRequest] | None = None
        self._max_texts = max_texts

    def add(self, text: str) -> None:
        self.texts.append(text)
        assert self.writer is not None
        self.writer.wake()

    def take(self) -> RouterServiceConnectRequest | None:
        if not self.texts:
            return None
        taken, self.texts = self.texts[: self._max_texts], self.texts[self._max_texts :]
        if self.texts and self.writer is not None:
            self.writer.wake()
        request = RouterServiceConnectRequest()
        request.hello.client_id = ",".join(taken)
        return request


class Server:
    """A peer that reads once it is allowed to."""

    def __init__(self) -> None:
        self.frames: list[list[str]] = []
        self.may_read = asyncio.Event()
        self.has_all = asyncio.Event()
        self.num_wanted = 0

    async def serve(self, stream: Any) -> None:
        await self.may_read.wait()
        while (frame := await stream.read()) is not None:
            self.frames.append(frame.hello.client_id.split(","))
            if sum(map(len, self.frames)) >= self.num_wanted:
                self.has_all.set()


@asynccontextmanager
async def connected(server: Server, port: int) -> AsyncIterator[LocalStream[RouterServiceConnectResponse, Any]]:
    local = LocalServer(server.serve, RouterServiceConnectRequest)
    await local.start(f"127.0.0.1:{port}")
    stream = await connect_local(f"127.0.0.1:{port}", RouterServiceConnectResponse)
    assert stream is not None
    try:
        async with asyncio.timeout(10):
            yield stream
    finally:
        stream.cancel()
        await local.stop(0.1)


class GrpcStream:
    """A stream that is not a local one."""

    def __init__(self, target: LocalStream[Any, Any]) -> None:
        self._target = target

    async def write(self, message: Any) -> None:
        await self._target.write(message)


@pytest.mark.parametrize("is_local", [True, False])
async def test_what_piles_up_in_a_turn_leaves_as_one(is_local: bool) -> None:
    """Each frame wakes every process on its path, so there must be few; a frame is sent without waiting for another
    event."""
    server, pile = Server(), Pile()
    server.may_read.set()
    async with connected(server, 3_100_001 + is_local) as stream:
        pile.writer = FrameWriter(stream if is_local else GrpcStream(stream), pile.take)
        running = asyncio.create_task(pile.writer.run())
        server.num_wanted = 3
        for text in "abc":
            pile.add(text)
        await server.has_all.wait()
        server.has_all.clear()
        server.num_wanted = 4
        pile.add("d")
        await server.has_all.wait()
        assert server.frames == [["a", "b", "c"], ["d"]]
        pile.writer.finish()
        await running


@pytest.mark.parametrize("is_local", [True, False])
async def test_what_comes_soon_after_a_write_waits_for_more(is_local: bool) -> None:
    """Engines faster than any model, and the frames of many shards, rarely wake a process. A finish is sent at once."""
    server, pile = Server(), Pile()
    server.may_read.set()
    async with connected(server, 3_100_006 + is_local) as stream:
        pile.writer = FrameWriter(stream if is_local else GrpcStream(stream), pile.take, interval_seconds=0.4)
        running = asyncio.create_task(pile.writer.run())
        for expected in ([["a"]], [["a"], ["b", "c", "d"]]):
            server.num_wanted = 1 if expected == [["a"]] else 4
            for text in expected[-1]:
                pile.add(text)
                for _turn in range(3):
                    await asyncio.sleep(0)
            await server.has_all.wait()
            server.has_all.clear()
            assert server.frames == expected
        pile.add("e")
        pile.writer.finish()
        await running
        server.num_wanted = 5
        stream.end()
        await server.has_all.wait()
        assert server.frames[2:] == [["e"]]


async def test_what_one_message_cannot_have_follows_in_the_next() -> None:
    """Messages are bounded, and no pending text is lost."""
    server, pile = Server(), Pile(max_texts=2)
    server.may_read.set()
    async with connected(server, 3_100_003) as stream:
        pile.writer = FrameWriter(stream, pile.take)
        server.num_wanted = 5
        for text in "abcde":
            pile.add(text)
        await server.has_all.wait()
        assert server.frames == [["a", "b"], ["c", "d"], ["e"]]


async def test_while_the_peer_does_not_read_everything_piles_up() -> None:
    """Messages accumulate with their owner, which bounds them. Once the peer reads again, they arrive in order and in
    few messages."""
    server, pile = Server(), Pile()
    async with connected(server, 3_100_004) as stream:
        pile.writer = FrameWriter(stream, pile.take)
        running = asyncio.create_task(pile.writer.run())
        num_large = 1
        while not stream.is_choked:
            pile.add("x" * 100_000)
            num_large += 1
            await asyncio.sleep(0)
        pile.add("y" * 100_000)  # what `run` takes along before it waits
        await eventually(lambda: not pile.texts, "the text is taken")
        for number in range(100):
            pile.add(str(number))
            await asyncio.sleep(0)
        assert len(pile.texts) == 100
        server.num_wanted = num_large + 100
        server.may_read.set()
        await server.has_all.wait()
        assert server.frames[-1] == [str(number) for number in range(100)]
        pile.writer.finish()
        await running


async def test_what_take_raises_is_raised_by_run() -> None:
    """An exception in `take` must end the stream, not vanish in the event loop."""
    async with connected(Server(), 3_100_005) as stream:

        def fail() -> None:
            raise ValueError("no message")

        writer: FrameWriter[Any] = FrameWriter(stream, fail)
        running = asyncio.create_task(writer.run())
        writer.wake()
        with pytest.raises(ValueError, match="no message"):
            await running
