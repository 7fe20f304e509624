"""The HTTP server: aiohttp's protocol without its application layer, so that a request meets one table and one handler,
and so that even a request that is not HTTP gets an error in OpenAI's form."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from edge_http.edge import Edge
from edge_http.server.connection import Connection
from edge_http.server.http_router import HttpRouter
from kvloom.process.service import StartError

log = structlog.get_logger()

BACKLOG: Final = 1024
SHUTDOWN_SECONDS: Final = 1.0
LEAVE_SECONDS: Final = 1.0
"""How long idle connections stay open once a successor takes the new ones: a request may be on its way in them. Also
behind an answer that had begun before, and said that its connection stays open."""
LEAVE_POLL_SECONDS: Final = 0.02


class _Server(web.Server):
    def __init__(self, edge: Edge) -> None:
        # Cancelling handlers is how a client that goes away ends its request.
        super().__init__(HttpRouter(edge), handler_cancellation=True, request_factory=self._request)
        self._edge = edge

    def __call__(self) -> web.RequestHandler:
        return Connection(self, self._edge)

    def _request(
        self, message: RawRequestMessage, payload: StreamReader, protocol: Any, writer: AbstractStreamWriter, task: Any
    ) -> web.BaseRequest:
        kind = _LastRequest if self._edge.leaving else web.BaseRequest
        return kind(message, payload, protocol, writer, task, asyncio.get_running_loop())


class _LastRequest(web.BaseRequest):
    """Of its connection: the answer says that it will be closed."""

    @property
    def keep_alive(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return False


class EdgeServer:
    """An Edge that listens."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._connections = _Server(edge)
        self._runner = web.ServerRunner(self._connections, shutdown_timeout=SHUTDOWN_SECONDS)
        self._taken_over: web.SockSite | None = None

    async def take_over(self, listener: socket.socket) -> str:
        """Serve what comes to a socket that is bound already, and that others may go on with. Returns "host:port"."""
        await self._set_up()
        site = web.SockSite(self._runner, listener, backlog=BACKLOG)
        host, port = listener.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        await self._listen(site, address)
        self._taken_over = site
        return address

    async def listen(self, host: str, port: int) -> str:
        """Port 0 picks one. Returns "host:port". Raises StartError when the port is taken."""
        await self._set_up()
        site = web.TCPSite(self._runner, host, port, reuse_port=False, backlog=BACKLOG)
        await self._listen(site, f"{host}:{port}")
        return f"{host}:{site.port}"

    async def _set_up(self) -> None:
        if self._runner.server is None:
            await self._runner.setup()

    async def _listen(self, site: web.BaseSite, address: str) -> None:
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise StartError(f"cannot listen on {address}: {error.strerror or error}") from error

    async def drain(self, on_leave: Callable[[], None] = lambda: None) -> None:
        """Let running requests finish within the drain timeout, /ready says 503. New ones are refused (503); but with a
        socket that others go on with, requests that come over connections which exist are served, and those closed.
        `on_leave` is called when such a socket is no longer looked at."""
        try:
            async with asyncio.timeout(self._edge.config.drain_timeout_seconds):
                if self._taken_over is not None:
                    await self._taken_over.stop()
                    on_leave()
                    await self._leave()
                self._edge.drain()
                await self._edge.wait_idle()
        except TimeoutError:
            self._edge.drain()
            log.warning("drain timed out", num_running=self._edge.num_running)

    async def _leave(self) -> None:
        self._edge.leave()
        loop = asyncio.get_running_loop()
        idle_since = loop.time()
        while loop.time() < idle_since + LEAVE_SECONDS:
            # aiohttp does not say when a connection ends, nor when one that was accepted just now begins.
            await asyncio.sleep(LEAVE_POLL_SECONDS)
            if not self._connections.connections:
                return
            if self._edge.num_running:
                idle_since = loop.time()

    async def stop(self) -> None:
        """Close all connections; what still runs is cancelled, in the engine too."""
        await self._edge.resume.close()
        await self._runner.cleanup()
