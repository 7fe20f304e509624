"""Frames between two processes of one machine, over a Unix socket: the same messages as over gRPC, a fifth of its cost.

A service that listens for gRPC on a port of the loopback interface also listens on an abstract Unix socket that is
named after that address (`LocalServer`). A client that is given such an address looks there first (`connect_local`) and
takes gRPC when nobody answers. Both ends behave as gRPC's own stream does, so that what uses them is the same code:
`read`, `write`, `cancel`, a status at the end, AioRpcError when it breaks.

What is on the wire: kvloom/transport/local_frames.py. Only processes of the same user (or root's) are talked to. See
ADR 9.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from kvloom.transport.local_frames import (
    END,
    HEAD,
    MAX_MESSAGE_BYTES,
    MESSAGE,
    PING,
    PONG,
    STATUS_DETAILS,
    error_of,
    is_whole,
    status_of,
    unavailable,
)
from kvloom.transport.local_socket import is_trusted

In = TypeVar("In", bound=Message)
Out = TypeVar("Out", bound=Message)

MAX_WAITING_BYTES: Final = 4 * 2**20
"""Unread frames beyond this make the socket wait."""
MAX_UNSENT_BYTES: Final = 256 * 2**10
"""Beyond this a write waits for the peer."""
PING_AFTER_SECONDS: Final = 10.0
PING_TIMEOUT_SECONDS: Final = 5.0
"""A peer that has been silent for both together hangs: the stream breaks."""
LINGER_SECONDS: Final = 2.0
"""How long what was written before the end may take."""


class LocalStream(asyncio.Protocol, Generic[In, Out]):
    """One end of a stream. Reads `In`, writes `Out`; one reader and one writer at a time."""

    def __init__(self, in_type: type[In], on_open: Callable[[LocalStream[In, Out]], None] | None = None) -> None:
        self._parse = in_type.FromString
        self._on_open = on_open
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unparsed = bytearray()
        self._frames: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._is_paused = False
        self._reader: asyncio.Future[None] | None = None
        self._on_message: Callable[[In], None] | None = None
        """Who takes messages the moment they are here."""
        self._writer: asyncio.Future[None] | None = None
        self.is_choked = False
        """The peer does not read: what is written now is kept here."""
        self._status: status_pb2.Status | None = None
        """How the stream ended; None while it has not."""
        self._heard_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()
        """Set when the socket is gone."""

    # -- as gRPC's calls and contexts have it -------------------------------------------------------------------------

    async def read(self) -> In | None:
        """The next message; None when the peer has ended the stream in good order. Raises AioRpcError."""
        while not self._frames:
            if self._status is not None:
                # A server's end says no more than this; its handler is cancelled besides.
                if self._status.code and self._on_open is None:
                    raise self._error()
                return None
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        frame = self._frames.popleft()
        self._num_waiting_bytes -= len(frame)
        if self._is_paused and self._num_waiting_bytes < MAX_WAITING_BYTES // 2 and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        try:
            return self._parse(frame)
        except DecodeError as error:
            self._break("a frame is no message")
            raise self._error() from error

    async def deliver(self, on_message: Callable[[In], None]) -> None:
        """Instead of `read`, without a task to be woken: each message goes to `on_message` the moment it is here, until
        the peer has ended the stream in good order. Raises AioRpcError, and what `on_message` raises; nothing is
        delivered behind that."""
        over = self._reader = self._loop.create_future()
        self._on_message = on_message
        try:
            waiting, self._frames = self._frames, deque()
            self._num_waiting_bytes = 0
            for frame in waiting:
                self._hand_over(frame, on_message)
            if self._is_paused and self._transport is not None:
                self._is_paused = False
                self._transport.resume_reading()
            if self._status is None:
                await over
            elif over.done():
                over.result()
        finally:
            self._on_message = self._reader = None
        if self._status is not None and self._status.code and self._on_open is None:
            raise self._error()

    async def write(self, message: Out) -> None:
        """Returns once the message is on its way, or in a bounded buffer. Raises AioRpcError."""
        if not self.write_now(message):
            raise self._error()
        if self.is_choked:
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
            if self._status is not None:
                raise self._error()

    def write_now(self, message: Out) -> bool:
        """Whether the stream takes messages. The caller looks at `is_choked` and waits."""
        transport = self._transport
        if self._status is not None or transport is None:
            return False
        payload = message.SerializeToString()
        transport.write(HEAD.pack(len(payload), MESSAGE) + payload)
        return True

    def cancel(self) -> bool:
        """Break it off. Repeatable."""
        self._break("cancelled", grpc.StatusCode.CANCELLED)
        return True

    def invocation_metadata(self) -> tuple[()]:
        """There is none."""
        return ()

    async def abort_with_status(self, status: grpc.Status) -> None:
        """End it with an error. Raises AbortError, as gRPC's own does."""
        details = dict(status.trailing_metadata or ()).get(STATUS_DETAILS)
        said = status_pb2.Status(code=status.code.value[0], message=status.details)
        if isinstance(details, bytes):
            said.MergeFromString(details)
        self.end(said)
        raise grpc.aio.AbortError

    def end(self, status: status_pb2.Status | None = None) -> None:
        """End it in good order, or with `status`; what was written is delivered. Repeatable."""
        if self._status is None and self._transport is not None:
            payload = (status or status_pb2.Status()).SerializeToString()
            self._transport.write(HEAD.pack(len(payload), END) + payload)
            self._finish(status or status_pb2.Status())
            self._transport.close()
            self._loop.call_later(LINGER_SECONDS, self._transport.abort)  # nobody may read it

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        if not is_trusted(transport.get_extra_info("socket")):
            self._break("the peer is another user's process", grpc.StatusCode.PERMISSION_DENIED)
            return
        self._timer = self._loop.call_later(PING_AFTER_SECONDS, self._on_timer)
        if self._on_open is not None:
            self._on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._finish(unavailable("the connection was lost"))
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self.is_choked = True

    def resume_writing(self) -> None:
        self.is_choked = False
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        unparsed = self._unparsed
        if unparsed:
            unparsed += data
            data = bytes(unparsed) if is_whole(unparsed) else b""
            if not data:
                return
            unparsed.clear()
        position, size = 0, len(data)
        while size - position >= HEAD.size:
            length, kind = HEAD.unpack_from(data, position)
            if length > MAX_MESSAGE_BYTES:
                self._break("a frame is too large")
                return
            end = position + HEAD.size + length
            if end > size:
                break
            payload = data[position + HEAD.size : end]
            position = end
            if kind == MESSAGE and self._on_message is not None:
                self._hand_over(payload, self._on_message)
            else:
                self._take(kind, payload)
        if position < size:
            unparsed += data[position:]
        if self._frames and self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _hand_over(self, payload: bytes, on_message: Callable[[In], None]) -> None:
        """A message to whoever `deliver`s. Once that is over, or cancelled, messages are dropped."""
        over = self._reader
        if over is None or over.done():
            return
        try:
            message = self._parse(payload)
        except DecodeError:
            self._break("a frame is no message")
            return
        try:
            on_message(message)
        except Exception as error:  # the deliverer's, not the event loop's
            if not over.done():
                over.set_exception(error)

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == MESSAGE:
            self._frames.append(payload)
            self._num_waiting_bytes += len(payload)
            if self._num_waiting_bytes > MAX_WAITING_BYTES and not self._is_paused and self._transport is not None:
                self._is_paused = True
                self._transport.pause_reading()
        elif kind == PING:
            if self._transport is not None and not self._transport.is_closing():
                self._transport.write(HEAD.pack(0, PONG))
        elif kind == END:
            try:
                status = status_pb2.Status.FromString(payload)
            except DecodeError:
                status = unavailable("the end of the stream is no status")
            self._finish(status)
            if self._transport is not None:
                self._transport.close()

    def _on_timer(self) -> None:
        """Silence for a while asks for a sign of life; no answer to that ends the stream. A peer that waits for us to
        read is not silent."""
        if self._transport is None:
            return
        silent_seconds = self._loop.time() - self._heard_at
        if silent_seconds >= PING_AFTER_SECONDS + PING_TIMEOUT_SECONDS and not self._is_paused:
            self._break("the peer does not answer")
            return
        if silent_seconds >= PING_AFTER_SECONDS:
            self._transport.write(HEAD.pack(0, PING))
            pause_seconds = PING_AFTER_SECONDS + PING_TIMEOUT_SECONDS - silent_seconds
        else:
            pause_seconds = PING_AFTER_SECONDS - silent_seconds
        self._timer = self._loop.call_later(max(pause_seconds, 0.1), self._on_timer)

    def _finish(self, status: status_pb2.Status) -> None:
        """Nothing more will come; what has come can still be read."""
        if self._status is None:
            self._status = status
        for waiter in (self._reader, self._writer):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def _break(self, message: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        if self._status is not None:
            return  # it has ended: what is on its way may arrive
        self._finish(status_of(code, message))
        if self._transport is not None:
            self._transport.abort()

    def _error(self) -> grpc.aio.AioRpcError:
        return error_of(self._status or unavailable("not connected"))


async def deliver(stream: Any, kind: type[In], on_message: Callable[[In], None]) -> None:
    """`LocalStream.deliver` for gRPC's streams as well."""
    if isinstance(stream, LocalStream):
        await cast(LocalStream[In, Any], stream).deliver(on_message)
        return
    while isinstance(message := await stream.read(), kind):
        on_message(message)
