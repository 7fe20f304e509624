"""The service's side of local streams: see kvloom/transport/local_stream.py."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from kvloom.transport.local_socket import local_socket_name
from kvloom.transport.local_stream import LocalStream

log = logging.getLogger(__name__)

In = TypeVar("In", bound=Message)

BACKLOG: Final = 128
RETRY_SECONDS: Final = 0.1


class LocalServer(Generic[In]):
    """Serves one streaming RPC: `handler` is called with each stream, in a task, and the stream ends when it returns.
    As with gRPC, the task is cancelled when its client goes."""

    def __init__(self, handler: Callable[[Any], Awaitable[None]], in_type: type[In]) -> None:
        self._handler = handler
        self._in_type = in_type
        self._server: asyncio.Server | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, address: str) -> None:
        """Listen beside a gRPC address; does nothing where only other machines can reach it. To be called before the
        gRPC server starts: clients look here first."""
        name = local_socket_name(address)
        if name is None:
            return
        try:
            await self._listen(name)
        except OSError as error:
            # Held by the process that this one succeeds and shares its port with, or by a squatter. Until it is free,
            # everybody takes gRPC.
            log.info("cannot listen on the local socket of %s yet: %s", address, error)
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
        """Take no more clients; streams that have not ended after the grace are cancelled. Repeatable."""
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
        except asyncio.CancelledError:
            if not stream.closed.done():
                raise
        except Exception:
            if not stream.closed.done():
                log.exception("a local stream failed")
        finally:
            stream.cancel()
