"""Streams over local sockets behave like gRPC's: messages arrive, and ends and breaks are reported."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvloom.errors import KvloomError, protocol_violation
from kvloom.transport.grpc_errors import abort, from_rpc_error
from kvloom.transport.local_client import connect_local
from kvloom.transport.local_socket import local_socket_name
from kvloom.transport.local_stream import LocalStream
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import ClientHello, RouterServiceConnectRequest, RouterServiceConnectResponse
from kvloom_common.transport.local_server import LocalServer
from tests.waiting import eventually

Handler = Callable[[Any], Awaitable[None]]


def request_of(text: str) -> RouterServiceConnectRequest:
    return RouterServiceConnectRequest(hello=ClientHello(client_id=text))


async def echo(stream: Any) -> None:
    while (frame := await stream.read()) is not None:
        response = RouterServiceConnectResponse()
        response.step.deltas.append(frame.hello.client_id)
        await stream.write(response)


@asynccontextmanager
async def serving(handler: Handler, port: int) -> AsyncIterator[str]:
    """A port that serves only as a name: nothing listens on it."""
    server = LocalServer(handler, RouterServiceConnectRequest)
    address = f"127.0.0.1:{port}"
    await server.start(address)
    try:
        yield address
    finally:
        await server.stop(0.1)


async def connected(address: str) -> Any:
    stream = await connect_local(address, RouterServiceConnectResponse)
    assert stream is not None
    return stream


async def test_messages_of_any_size_arrive_in_order() -> None:
    """Messages may be empty, or take many reads."""
    async with serving(echo, 3_000_001) as address, asyncio.timeout(10):
        stream = await connected(address)
        texts = ["", "a", "b" * 3_000_000, *map(str, range(200))]
        for text in texts:
            await stream.write(request_of(text))
            assert (await stream.read()).step.deltas == [text]
        stream.cancel()


async def test_an_error_of_the_server_keeps_its_details() -> None:
    """A client that broke the protocol gets the reason, as over gRPC."""

    async def refuse(stream: Any) -> None:
        await stream.read()
        await abort(stream, protocol_violation("Not like this."))

    async with serving(refuse, 3_000_002) as address, asyncio.timeout(10):
        stream = await connected(address)
        await stream.write(request_of("x"))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stream.read()
        error: KvloomError = from_rpc_error(raised.value)
        assert (error.reason, error.message) == (ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, "Not like this.")


async def test_a_handler_that_returns_ends_the_stream_in_good_order() -> None:
    """Its last messages arrive before the end."""

    async def say_goodbye(stream: Any) -> None:
        await stream.write(RouterServiceConnectResponse())

    async with serving(say_goodbye, 3_000_003) as address, asyncio.timeout(10):
        stream = await connected(address)
        assert await stream.read() == RouterServiceConnectResponse()
        assert await stream.read() is None


async def test_the_handler_of_a_client_that_is_gone_is_cancelled() -> None:
    """As with gRPC, no handler runs on without its client."""
    begun, gone = asyncio.Event(), asyncio.Event()

    async def wait(stream: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    async with serving(wait, 3_000_004) as address, asyncio.timeout(10):
        stream = await connected(address)
        await begun.wait()
        stream.cancel()
        await gone.wait()


async def test_a_server_that_stops_breaks_its_streams() -> None:
    """The client notices at once and can look for another server."""
    server = LocalServer(echo, RouterServiceConnectRequest)
    await server.start("127.0.0.1:3000005")
    async with asyncio.timeout(10):
        stream = await connected("127.0.0.1:3000005")
        await stream.write(request_of("x"))
        await stream.read()
        await server.stop(0.05)
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()
        assert await connect_local("127.0.0.1:3000005", RouterServiceConnectResponse) is None


async def test_a_writer_waits_for_a_reader_that_does_not_read() -> None:
    """Buffers are bounded on both sides. Once the peer reads again, the writer continues."""
    may_read = asyncio.Event()

    async def read_late(stream: Any) -> None:
        await may_read.wait()
        while await stream.read() is not None:
            pass

    async with serving(read_late, 3_000_006) as address, asyncio.timeout(10):
        stream = await connected(address)
        num_written = 0

        async def write_all() -> None:
            nonlocal num_written
            for _ in range(40):
                await stream.write(request_of("x" * 500_000))
                num_written += 1

        writing = asyncio.create_task(write_all())
        await asyncio.wait({writing}, timeout=0.2)
        assert num_written < 30
        may_read.set()
        await writing
        stream.cancel()


async def test_a_peer_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process closes no connection: only its silence shows that it hangs."""
    monkeypatch.setattr("kvloom.transport.local_stream.PING_AFTER_SECONDS", 0.1)
    monkeypatch.setattr("kvloom.transport.local_stream.PING_TIMEOUT_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind("\0kvloom/3000007")
        silent.listen()
        stream = await connected("127.0.0.1:3000007")
        with pytest.raises(grpc.aio.AioRpcError, match="does not answer"):
            await asyncio.wait_for(stream.read(), 10)


async def test_a_process_that_was_stopped_asks_before_it_gives_a_peer_up() -> None:
    """It has heard nothing for long because it could not listen, and its peer has nothing to say."""

    async def read(stream: Any) -> None:
        await stream.read()

    async with serving(read, 3_000_019) as address, asyncio.timeout(10):
        stream = await connected(address)
        stopped_at = stream._heard_at = stream._heard_at - 100.0
        stream._on_timer()
        await eventually(lambda: stream._heard_at > stopped_at, "the peer's answer")
        assert not stream.closed.done()
        stream.cancel()


async def test_messages_are_delivered_as_they_come() -> None:
    """Messages that arrived before, together, or one after another are delivered once each and in order."""
    taken: list[str] = []
    has_five = asyncio.Event()

    async def take(stream: Any) -> None:
        await stream.read()

        def on_message(frame: RouterServiceConnectRequest) -> None:
            taken.append(frame.hello.client_id)
            if len(taken) == 5:
                has_five.set()

        await stream.deliver(on_message)

    async with serving(take, 3_000_008) as address, asyncio.timeout(10):
        stream = await connected(address)
        for text in ("first", "a", "b"):
            await stream.write(request_of(text))
        await asyncio.sleep(0)
        for text in ("c", "d", "e"):
            await stream.write(request_of(text))
        await has_five.wait()
        assert taken == ["a", "b", "c", "d", "e"]
        stream.cancel()


async def test_delivering_ends_with_the_stream() -> None:
    """After a clean end it returns; an error of the server is raised with its details."""

    async def end(stream: Any) -> None:
        frame = await stream.read()
        await stream.write(RouterServiceConnectResponse())
        if frame.hello.client_id:
            await abort(stream, protocol_violation("Not like this."))

    async with serving(end, 3_000_009) as address, asyncio.timeout(10):
        for text in ("", "bad"):
            stream = await connected(address)
            await stream.write(request_of(text))
            taken: list[RouterServiceConnectResponse] = []
            if text:
                with pytest.raises(grpc.aio.AioRpcError, match="Not like this"):
                    await stream.deliver(taken.append)
            else:
                await stream.deliver(taken.append)
            assert len(taken) == 1


async def test_a_callback_that_raises_gets_no_more_messages() -> None:
    """The error is raised by `deliver`, not in the event loop; later messages are dropped."""

    async def speak(stream: Any) -> None:
        for _ in range(3):
            await stream.write(RouterServiceConnectResponse())
        await asyncio.Event().wait()

    num_taken = 0

    def fail(_message: RouterServiceConnectResponse) -> None:
        nonlocal num_taken
        num_taken += 1
        raise ValueError("no")

    async with serving(speak, 3_000_010) as address, asyncio.timeout(10):
        stream = await connected(address)
        with pytest.raises(ValueError, match="no"):
            await stream.deliver(fail)
        assert num_taken == 1
        stream.cancel()


async def test_nothing_is_delivered_after_a_cancellation() -> None:
    """A link that is being closed must not start anything new."""
    stream = LocalStream[Any, Any](RouterServiceConnectRequest)
    taken: list[Any] = []
    delivering = asyncio.create_task(stream.deliver(taken.append))
    await asyncio.sleep(0)
    delivering.cancel()
    payload = request_of("late").SerializeToString()
    stream.data_received(len(payload).to_bytes(4, "little") + b"\0" + payload)
    await asyncio.gather(delivering, return_exceptions=True)
    assert not taken


def test_other_machines_have_no_local_socket() -> None:
    """Only loopback addresses have a local socket; for all others there is gRPC."""
    assert local_socket_name("127.0.0.1:50051") == local_socket_name("localhost:50051") is not None
    assert local_socket_name("10.0.0.7:50051") is None
    assert local_socket_name("router.internal:50051") is None
