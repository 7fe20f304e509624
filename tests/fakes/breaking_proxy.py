"""A TCP proxy whose connections a test breaks: what lies between two processes when a network fails."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable


class BreakingProxy:
    """Passes bytes on until told otherwise. One per target; `address` is where to connect instead."""

    def __init__(self, target: str) -> None:
        self.redirect(target)
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._refuses = False
        self.delay_seconds = 0.0
        """How late everything arrives, in each direction."""
        self.num_connections = 0
        """That were ever made."""
        self.address = ""

    async def start(self) -> str:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self.address

    def reset(self) -> int:
        """Break every connection with RST; returns how many there were. New ones are passed on."""
        connections = list(self._connections)
        for connection in connections:
            connection.reset()
        return len(connections)

    def refuse(self, refuses: bool) -> None:
        """While set, new connections are reset at once."""
        self._refuses = refuses

    def redirect(self, target: str) -> None:
        """New connections go there."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))

    def freeze(self, frozen: bool) -> None:
        """While set, open connections stay open and pass nothing on: a partition."""
        for connection in self._connections:
            connection.freeze(frozen)

    async def stop(self) -> None:
        self.reset()
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.wait_closed(), 5.0)


class _Connection(asyncio.Protocol):
    """The near side; `_far` is the far one."""

    def __init__(self, proxy: BreakingProxy) -> None:
        self._proxy = proxy
        self._near: asyncio.Transport | None = None
        self._far: asyncio.Transport | None = None
        self._early = bytearray()
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._near = transport
        self._proxy._connections.add(self)
        self._proxy.num_connections += 1
        if self._proxy._refuses:
            self.reset()
        else:
            self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            self._far, _ = await loop.create_connection(lambda: _Far(self), *self._proxy._target)
            self._far.write(bytes(self._early))
        except OSError:
            self.reset()

    def data_received(self, data: bytes) -> None:
        self._later(self._pass_on, data)

    def pass_back(self, data: bytes) -> None:
        if self._near is not None:
            self._later(self._near.write, data)

    def _pass_on(self, data: bytes) -> None:
        if self._far is None:
            self._early += data
        else:
            self._far.write(data)

    def _later(self, write: Callable[[bytes], None], data: bytes) -> None:
        if self._proxy.delay_seconds:
            asyncio.get_running_loop().call_later(self._proxy.delay_seconds, write, data)
        else:
            write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._proxy._connections.discard(self)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._far is not None:
            self._far.close()

    def far_lost(self) -> None:
        if self._near is not None:
            self._near.close()

    def freeze(self, frozen: bool) -> None:
        for transport in (self._near, self._far):
            if transport is not None and not transport.is_closing():
                (transport.pause_reading if frozen else transport.resume_reading)()

    def reset(self) -> None:
        for transport in (self._near, self._far):
            if transport is not None:
                sock = transport.get_extra_info("socket")
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                transport.abort()


class _Far(asyncio.Protocol):
    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    def data_received(self, data: bytes) -> None:
        self._connection.pass_back(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.far_lost()
