"""The proxy of `kvloom-lab chaos`. If it did not really stall and reset connections, every run would pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from lab.chaos.fabric.proxy import FaultProxy


@pytest.fixture
async def proxy() -> AsyncIterator[FaultProxy]:
    """A proxy in front of an echo server."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(100):
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy = FaultProxy(lambda: (host, port))
    await proxy.start()
    yield proxy
    await proxy.close()
    server.close()


async def test_bytes_pass_in_both_directions_to_the_end(proxy: FaultProxy):
    """Without faults the proxy must not be noticed, and a side that has closed its half still gets an answer."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"x" * 300_000)
        writer.write_eof()
        assert await reader.read(-1) == b"x" * 300_000
        writer.close()


async def test_a_stall_holds_everything_and_loses_nothing(proxy: FaultProxy):
    """The connection stays open and silent."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        proxy.stall()
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.read(3)
        proxy.heal()
        assert await reader.readexactly(3) == b"two"
        writer.close()


async def test_a_reset_breaks_what_is_open_and_nothing_later(proxy: FaultProxy):
    """As when a machine disappears, the peers get an error instead of the end of the stream."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        assert proxy.reset() == 1
        with pytest.raises(ConnectionResetError):
            await reader.read(3)
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"two")
        assert await reader.readexactly(3) == b"two"
        writer.close()


async def test_a_delay_keeps_everything_in_order_to_the_end(proxy: FaultProxy):
    """The way to another region is long, and loses nothing."""
    proxy.delay_seconds = 0.02
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        began_at = loop.time()
        for number in range(100):
            writer.write(b"%d " % number)
            await asyncio.sleep(0)
        writer.write_eof()
        assert await reader.read(-1) == b"".join(b"%d " % number for number in range(100))
        assert loop.time() - began_at >= 2 * proxy.delay_seconds
        writer.close()
