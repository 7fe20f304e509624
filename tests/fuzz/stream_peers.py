"""Clients that write any bytes to a stream, over gRPC or a local socket, and read how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from kvloom.transport.local_frames import END, HEAD, MESSAGE, PING
from kvloom.transport.local_socket import local_socket_name
from tests.fuzz.target import check_message

REPLY_SECONDS: Final = 15.0
MAX_TRIES: Final = 5
LOST_STATUS: Final = "Internal error from Core"
"""What gRPC's own client reports now and then if a stream ends while it still writes: it has lost the status."""
CLIENT_FAULTS: Final = frozenset(
    (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
)
"""How a stream may end whatever its client has sent."""


class StreamEnd(NamedTuple):
    code: grpc.StatusCode
    message: str
    frames: list[bytes]
    """What the server sent."""


async def grpc_stream(channel: grpc.aio.Channel, method: str, frames: Sequence[bytes]) -> StreamEnd:
    """Write everything, half-close, and read to the end."""
    for _ in range(MAX_TRIES):
        end = await _grpc_stream(channel, method, frames)
        if end.message != LOST_STATUS:
            return end
    return StreamEnd(grpc.StatusCode.INVALID_ARGUMENT, "", end.frames)  # it has ended; how, this client cannot tell


async def _grpc_stream(channel: grpc.aio.Channel, method: str, frames: Sequence[bytes]) -> StreamEnd:
    call: Any = channel.stream_stream(method)()
    received: list[bytes] = []

    async def write() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for frame in frames:
                await call.write(frame)
            await call.done_writing()

    writing = asyncio.create_task(write())
    try:
        async with asyncio.timeout(REPLY_SECONDS):
            while (frame := await call.read()) is not grpc.aio.EOF:
                received.append(frame)
            await writing
            return StreamEnd(await call.code(), await call.details() or "", received)
    except grpc.aio.AioRpcError as error:
        await writing
        return StreamEnd(error.code(), error.details() or "", received)
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        call.cancel()


async def local_stream(address: str, frames: Sequence[bytes]) -> StreamEnd:
    """Write everything as messages and wait until it has arrived, then end the stream. A stream that is cut counts as
    INVALID_ARGUMENT: the server has disconnected its peer."""
    framed = b"".join(HEAD.pack(len(frame), MESSAGE) + frame for frame in frames)
    received = await local_bytes(address, framed + HEAD.pack(0, PING), HEAD.pack(0, END))
    return _parsed(received)


async def local_bytes(address: str, raw: bytes, last: bytes = b"") -> bytes:
    """Write bytes to a service's local socket; after its next reply write `last`, and read to the end."""
    name = local_socket_name(address)
    assert name is not None
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
        connection.connect(name)
        received = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(REPLY_SECONDS):
                await loop.sock_sendall(connection, raw)
                if not last:
                    connection.shutdown(socket.SHUT_WR)
                while chunk := await loop.sock_recv(connection, 65_536):
                    received += chunk
                    if last:
                        await loop.sock_sendall(connection, last)
                        last = b""
                        connection.shutdown(socket.SHUT_WR)
        return received


def _parsed(received: bytes) -> StreamEnd:
    frames: list[bytes] = []
    position = 0
    status: status_pb2.Status | None = None
    while len(received) - position >= HEAD.size:
        length, kind = HEAD.unpack_from(received, position)
        payload = received[position + HEAD.size : position + HEAD.size + length]
        position += HEAD.size + length
        if kind == MESSAGE:
            frames.append(payload)
        elif kind == END:
            status = status_pb2.Status.FromString(payload)
    if status is None:
        return StreamEnd(grpc.StatusCode.INVALID_ARGUMENT, "", frames)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return StreamEnd(code, status.message, frames)


def check_end(end: StreamEnd) -> None:
    """The stream ended well, or by the client's fault, in words that are meant for its developer."""
    assert end.code in CLIENT_FAULTS, (end.code, end.message)
    check_message(end.message)


def parsed(frame: bytes, kind: Any) -> Any:
    """What a server sends is well-formed."""
    try:
        return kind.FromString(frame)
    except DecodeError as error:
        raise AssertionError(f"the server sent {frame!r}") from error
