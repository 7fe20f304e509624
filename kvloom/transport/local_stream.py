"""Streams between two processes of one machine, over a Unix socket: gRPC's messages at a fifth of its cost.

A service that listens for gRPC on a port of the loopback interface also listens on an abstract Unix socket that is
named after that address (`LocalServer`). A client that is given such an address tries the socket first
(`connect_local`), and uses gRPC when nothing listens there. Both ends behave like gRPC's own streams, so that the same
code uses either: `read`, `write`, `cancel`, a status at the end, AioRpcError when the stream breaks.

The wire format is in kvloom/transport/local_frames.py. Only processes of the same user, or of root, are accepted as
peers. See ADR 9.
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
"""With more unread frames than this, reading from the socket is paused."""
MAX_UNSENT_BYTES: Final = 256 * 2**10
"""With more unsent bytes than this, `write` waits for the peer."""
PING_AFTER_SECONDS: Final = 10.0
PING_TIMEOUT_SECONDS: Final = 5.0
"""A peer that has been silent for the sum of both hangs: the stream breaks."""
LINGER_SECONDS: Final = 2.0
"""How long the delivery of messages that were written before the end may take."""


class LocalStream(asyncio.Protocol, Generic[In, Out]):
    """One end of a stream, which reads `In` and writes `Out`. There may be one reader and one writer at a time."""

    def __init__(self, in_type: type[In], on_open: Callable[[LocalStream[In, Out]], None] | None = None) -> None:
        """`on_open` is given by a server only."""
        self._parse = in_type.FromString
        self._on_open = on_open
        self._is_server = on_open is not None
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unparsed = bytearray()
        self._frames: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._is_paused = False
        self._reader: asyncio.Future[None] | None = None
        self._on_message: Callable[[In], None] | None = None
        """The callback of `deliver`, while that runs."""
        self._writer: asyncio.Future[None] | None = None
        self.is_choked = False
        """The peer does not read; messages that are written now are buffered here."""
        self._status: status_pb2.Status | None = None
        """The status with which the stream ended; None while it is open."""
        self._heard_at = self._loop.time()
        self._pinged_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()
        """Done when the socket is closed."""

    # -- the methods of gRPC's calls and contexts ---------------------------------------------------------------------

    async def read(self) -> In | None:
        """The next message; None when the peer has ended the stream cleanly. Raises AioRpcError, and on a server
        DecodeError for a malformed message."""
        while not self._frames:
            if self._status is not None:
                # On a server a broken stream reads as ended, as in gRPC; its handler is cancelled as well.
                if self._status.code and not self._is_server:
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
            self._pinged_at = 0.0  # the peer may have answered, which was not read
            self._transport.resume_reading()
        try:
            return self._parse(frame)
        except DecodeError as error:
            if self._is_server:
                raise  # as from gRPC's streams: the client is told
            self._break("A frame could not be parsed.")
            raise self._error() from error

    async def deliver(self, on_message: Callable[[In], None]) -> None:
        """Call `on_message` with each message as soon as it arrives, until the peer has ended the stream cleanly.
        Replaces `read`, and wakes no task per message. Raises as `read` does, and what `on_message` raises; nothing is
        delivered after that."""
        over = self._reader = self._loop.create_future()
        self._on_message = on_message
        try:
            waiting, self._frames = self._frames, deque()
            self._num_waiting_bytes = 0
            for frame in waiting:
                self._hand_over(frame, on_message)
            if self._is_paused and self._transport is not None:
                self._is_paused = False
                self._pinged_at = 0.0  # the peer may have answered, which was not read
                self._transport.resume_reading()
            if self._status is None:
                await over
            elif over.done():
                over.result()
        finally:
            self._on_message = self._reader = None
        if self._status is not None and self._status.code and not self._is_server:
            raise self._error()

    async def write(self, message: Out) -> None:
        """Return once the message is sent, or in a bounded buffer. Raises AioRpcError."""
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
        """Write without waiting; returns False if the stream has ended. The caller checks `is_choked` and waits."""
        transport = self._transport
        if self._status is not None or transport is None:
            return False
        payload = message.SerializeToString()
        transport.write(HEAD.pack(len(payload), MESSAGE) + payload)
        return True

    def cancel(self) -> bool:
        """Break the stream. Calling it again is safe."""
        self._break("The stream was cancelled.", grpc.StatusCode.CANCELLED)
        return True

    def invocation_metadata(self) -> tuple[()]:
        """A local stream has no metadata."""
        return ()

    async def abort_with_status(self, status: grpc.Status) -> None:
        """End the stream with an error. Raises AbortError, as gRPC's own method does."""
        details = dict(status.trailing_metadata or ()).get(STATUS_DETAILS)
        whole_status = status_pb2.Status(code=status.code.value[0], message=status.details)
        if isinstance(details, bytes):
            whole_status.MergeFromString(details)
        self.end(whole_status)
        raise grpc.aio.AbortError

    def end(self, status: status_pb2.Status | None = None) -> None:
        """End the stream cleanly, or with `status`. Messages that were written are still delivered. Calling it again is
        safe."""
        if self._status is None and self._transport is not None:
            payload = (status or status_pb2.Status()).SerializeToString()
            self._transport.write(HEAD.pack(len(payload), END) + payload)
            self._finish(status or status_pb2.Status())
            self._transport.close()
            self._loop.call_later(LINGER_SECONDS, self._transport.abort)  # the peer may never read the rest

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        if not is_trusted(transport.get_extra_info("socket")):
            self._break("The peer is another user's process.", grpc.StatusCode.PERMISSION_DENIED)
            return
        self._timer = self._loop.call_later(PING_AFTER_SECONDS, self._on_timer)
        if self._on_open is not None:
            self._on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._finish(unavailable("The connection was lost."))
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
                message = f"A frame is larger than {MAX_MESSAGE_BYTES} bytes."
                self.end(status_of(grpc.StatusCode.RESOURCE_EXHAUSTED, message))
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
        """Pass a message to the callback of `deliver`. Once that has returned or was cancelled, messages are
        dropped."""
        over = self._reader
        if over is None or over.done():
            return
        try:
            message = self._parse(payload)
        except DecodeError as error:
            if self._is_server:
                over.set_exception(error)
            else:
                self._break("A frame could not be parsed.")
            return
        try:
            on_message(message)
        except Exception as error:  # `deliver` raises it, not the event loop
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
                status = unavailable("The status at the end of the stream could not be parsed.")
            self._finish(status)
            if self._transport is not None:
                self._transport.close()

    def _on_timer(self) -> None:
        """After some silence, send a ping; if it is not answered, break the stream. A peer that waits for this process
        to read is not silent."""
        if self._transport is None:
            return
        silent_seconds = self._loop.time() - self._heard_at
        if silent_seconds < PING_AFTER_SECONDS:
            pause_seconds = PING_AFTER_SECONDS - silent_seconds
        elif self._pinged_at > self._heard_at and not self._is_paused:
            self._break("The peer does not answer.")
            return
        else:
            # However long the silence was: it may be this process that was kept from reading.
            self._transport.write(HEAD.pack(0, PING))
            self._pinged_at = self._loop.time()
            pause_seconds = PING_TIMEOUT_SECONDS
        self._timer = self._loop.call_later(pause_seconds, self._on_timer)

    def _finish(self, status: status_pb2.Status) -> None:
        """Nothing more will arrive. Frames that have arrived can still be read."""
        if self._status is None:
            self._status = status
        for waiter in (self._reader, self._writer):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def _break(self, message: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        if self._status is not None:
            return  # it has ended already: what was written may still arrive
        self._finish(status_of(code, message))
        if self._transport is not None:
            self._transport.abort()

    def _error(self) -> grpc.aio.AioRpcError:
        return error_of(self._status or unavailable("The stream is not connected."))


async def deliver(stream: Any, kind: type[In], on_message: Callable[[In], None]) -> None:
    """Like `LocalStream.deliver`, for gRPC's streams too."""
    if isinstance(stream, LocalStream):
        await cast(LocalStream[In, Any], stream).deliver(on_message)
        return
    while isinstance(message := await stream.read(), kind):
        on_message(message)
