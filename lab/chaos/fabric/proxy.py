"""A TCP proxy on loopback that can delay, stall and reset its connections."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable
from typing import Final

_CHUNK_BYTES: Final = 64 * 2**10
_CONNECT_SECONDS: Final = 5.0
MAX_CONNECTIONS: Final = 4096
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
"""SO_LINGER of zero seconds: a closed connection is reset, as when a machine disappears."""


class FaultProxy:
    """`target` is called for each connection and returns where it goes, or None while there is no target."""

    def __init__(self, target: Callable[[], tuple[str, int] | None]) -> None:
        self._target = target
        self._connections: set[_Connection] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.delay_seconds = 0.0
        """How late everything arrives, in each direction."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.heal()
        self.reset()
        while self._connections:
            await asyncio.wait([one.task for one in self._connections], timeout=1.0)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def reset(self, share: float = 1.0, rng: random.Random | None = None) -> int:
        """Reset a share of the connections, drawn with `rng`. Returns how many."""
        chosen = [one for one in self._connections if rng is None or rng.random() < share]
        for connection in chosen:
            connection.reset()
        return len(chosen)

    def stall(self) -> None:
        """Read and forward nothing until `heal`. Connections stay open."""
        self._flows.clear()

    def heal(self) -> None:
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection(task, [writer])
        target = self._target()
        self._connections.add(connection)
        try:
            if target is None or len(self._connections) > MAX_CONNECTIONS:
                connection.reset()
                return
            async with asyncio.timeout(_CONNECT_SECONDS):
                up_reader, up_writer = await asyncio.open_connection(*target)
            connection.writers.append(up_writer)
            await self._pump_both(reader, writer, up_reader, up_writer)
        except OSError:
            connection.reset()
        finally:
            connection.close()
            self._connections.discard(connection)

    async def _pump_both(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> None:
        there = asyncio.create_task(self._pump(reader, up_writer), name="proxy, to the server")
        back = asyncio.create_task(self._pump(up_reader, writer), name="proxy, to the client")
        try:
            # The side that closes first may still get data. The connection ends when both have closed or one fails.
            await asyncio.gather(there, back)
        finally:
            for pump in (there, back):
                pump.cancel()
            await asyncio.gather(there, back, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Returns at the end of the stream. Raises OSError when a side is reset."""
        while True:
            await self._flows.wait()
            piece = await reader.read(_CHUNK_BYTES)
            await self._flows.wait()
            if not piece:
                await asyncio.sleep(self.delay_seconds)
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            if self.delay_seconds:
                asyncio.get_running_loop().call_later(self.delay_seconds, writer.write, piece)
                continue
            writer.write(piece)
            await writer.drain()


class _Connection:
    def __init__(self, task: asyncio.Task[object], writers: list[asyncio.StreamWriter]) -> None:
        self.task = task
        self.writers = writers

    def reset(self) -> None:
        for writer in self.writers:
            sock = writer.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()

    def close(self) -> None:
        for writer in self.writers:
            writer.close()
