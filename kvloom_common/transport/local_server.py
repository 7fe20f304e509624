"""The server side of local streams (kvloom/transport/local_stream.py)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError, Message

from kvloom.transport.grpc_errors import to_grpc_status
from kvloom.transport.local_socket import local_socket_name
from kvloom.transport.local_stream import LocalStream
from kvloom_common.transport.checked_server import malformed_message

log = structlog.get_logger()

In = TypeVar("In", bound=Message)

BACKLOG: Final = 128
RETRY_SECONDS: Final = 0.1


class LocalServer(Generic[In]):
    """Serves one streaming RPC: `handler` is called in a task for each stream, and the stream ends when it returns. As
    with gRPC, the task is cancelled when its client disconnects."""

    def __init__(self, handler: Callable[[Any], Awaitable[None]], in_type: type[In]) -> None:
        self._handler = handler
        self._in_type = in_type
        self._server: asyncio.Server | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, address: str) -> None:
        """Listen on the local socket of a gRPC address; does nothing if only other machines can reach the address. Call
        it before the gRPC server starts, because clients try the local socket first."""
        name = local_socket_name(address)
        if name is None:
            return
        try:
            await self._listen(name)
        except OSError as error:
            # The name is held by this process's predecessor, with which it shares its port, or by a foreign process.
            # Until it is free, all clients use gRPC.
            log.info("local_socket_awaited", address=address, error=str(error))
            self._waiting = asyncio.create_task(self._wait_for(name), name="local socket")

    async def _listen(self, name: str) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            listener.bind(name)
            listener.listen(BACKLOG)
            self._server = await asyncio.get_running_loop().create_unix_server(self._new_stream, sock=listener)
        except BaseException:
            listener.close()
            raise

    async def _wait_for(self, name: str) -> None:
        while self._server is None:
            await asyncio.sleep(RETRY_SECONDS)
            with contextlib.suppress(OSError):
                await self._listen(name)

    async def stop(self, grace_seconds: float) -> None:
        """Stop listening. Streams that have not ended after `grace_seconds` are cancelled. Calling it again is safe."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)
            self._waiting = None
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_seconds)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _new_stream(self) -> LocalStream[In, Any]:
        return LocalStream(self._in_type, self._on_open)

    def _on_open(self, stream: LocalStream[In, Any]) -> None:
        task = asyncio.create_task(self._serve(stream), name="local stream")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, stream: LocalStream[In, Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        stream.closed.add_done_callback(lambda _: task.cancel())
        try:
            await self._handler(stream)
            stream.end()
        except grpc.aio.AbortError:
            pass  # it has ended
        except DecodeError:
            with contextlib.suppress(grpc.aio.AbortError):
                await stream.abort_with_status(to_grpc_status(malformed_message()))
        except asyncio.CancelledError:
            if not stream.closed.done():
                raise
        except Exception:
            if not stream.closed.done():
                log.exception("local_stream_failed")
        finally:
            stream.cancel()
