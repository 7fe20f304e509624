"""The HTTP server. It uses aiohttp's protocol without its application layer, so that a request passes one routing table
and one handler, and so that even malformed HTTP gets an error in OpenAI's format."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.http_writer import HttpVersion10, HttpVersion11
from aiohttp.streams import StreamReader
from yarl import URL

from edge_http.edge import Edge
from edge_http.server.connection import Connection
from edge_http.server.http_router import HttpRouter
from edge_http.wire.headers import REQUEST_ID, UnservedVersionRequest, request_id
from edge_http.wire.request_callers import Check, checking
from edge_http.wire.request_record import RequestRecord
from kvloom_common.addresses import bare_host, join_address
from kvloom_common.limits.address_limit import AddressLimit
from kvloom_common.process.request_context import current_request
from kvloom_common.process.service import StartError
from kvloom_common.trust.fabric_trust import FabricTrust

log = structlog.get_logger()

BACKLOG: Final = 1024
SHUTDOWN_SECONDS: Final = 1.0
ANNOUNCED_SECONDS: Final = 0.5
"""How long new connections are accepted after others have been told that they should accept them. Those in the queue of
a socket that its last owner closes are lost."""
LEAVE_SECONDS: Final = 1.0
"""How long idle connections stay open once a successor accepts new ones, because a request may be in flight on them.
The time also applies after a response that began earlier and announced that its connection stays open."""
LEAVE_POLL_SECONDS: Final = 0.02
_SERVED_VERSIONS: Final = (HttpVersion11, HttpVersion10)


class _Server(web.Server):
    def __init__(self, edge: Edge, check: Check | None = None) -> None:
        # When a client disconnects, its handler is cancelled, which ends its request.
        make = self._prefixed_request if edge.config.root_path else self._request
        super().__init__(HttpRouter(edge, check), handler_cancellation=True, request_factory=make)
        self._edge = edge
        self._address_limit = AddressLimit(
            edge.admission.caller_limits.max_connections_per_address, edge.config.trusted_proxies
        )

    def __call__(self) -> web.RequestHandler:
        return Connection(self, self._edge, self._address_limit)

    def _request(
        self, message: RawRequestMessage, payload: StreamReader, protocol: Any, writer: AbstractStreamWriter, task: Any
    ) -> web.BaseRequest:
        kind = _LastRequest if self._edge.admission.leaving else _Request
        if message.version not in _SERVED_VERSIONS:
            kind, message = _UnservedRequest, message._replace(version=HttpVersion11, should_close=True)
        return kind(message, payload, protocol, writer, task, asyncio.get_running_loop())

    def _prefixed_request(self, message: RawRequestMessage, *context: Any) -> web.BaseRequest:
        """Without the prefix of a proxy that has left it there."""
        path = message.path.removeprefix(self._edge.config.root_path)
        if path != message.path and path.startswith("/") and not path.startswith("//"):
            message = message._replace(path=path, url=URL(path, encoded=True))
        return self._request(message, *context)


class _Request(web.BaseRequest):
    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """aiohttp calls this when a response's headers are complete. It has added its own version and Python's, which
        are of use only to attackers."""
        response.headers.pop("Server", None)
        record = current_request()
        if isinstance(record, RequestRecord):
            response.headers.update(record.response_headers())
            if isinstance(response, web.Response):  # nothing else asks for the answer; of a stream, its end does
                record.end(response.status)
        else:  # the request is not valid HTTP
            response.headers[REQUEST_ID] = request_id(self)


class _LastRequest(_Request):
    """The last request of its connection: the response announces that the connection will be closed."""

    @property
    def keep_alive(self) -> bool:  # pyrefly: ignore[bad-override]
        return False


class _UnservedRequest(_Request, UnservedVersionRequest):
    """It is refused, in a version that every client reads."""


class EdgeServer:
    """The HTTP server of an Edge: its listeners, its drain and its end."""

    def __init__(self, edge: Edge, *, shutdown_seconds: float = SHUTDOWN_SECONDS) -> None:
        """`shutdown_seconds`: how long what still runs has when the server stops, before and after it is cancelled."""
        self._edge = edge
        self._connections = _Server(edge)
        self._runner = web.ServerRunner(self._connections, shutdown_timeout=shutdown_seconds)
        self._fabric: web.ServerRunner | None = None
        self._shutdown_seconds = shutdown_seconds
        self._handed_over: list[web.BaseSite] = []
        """The listeners that a successor continues to serve."""

    async def take_over(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> str:
        """Serve a socket that is bound already and that successors may continue to use. Returns "host:port"."""
        await self._set_up()
        site = web.SockSite(self._runner, listener, backlog=BACKLOG, ssl_context=tls)
        host, port = listener.getsockname()[:2]
        address = join_address(host, port)
        await self._listen(site, address)
        self._handed_over.append(site)
        return address

    async def listen(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, *, shares_port: bool = False
    ) -> str:
        """Listen on a port; 0 picks a free one. With `shares_port`, a successor may listen on it too. Returns
        "host:port". Raises StartError if the port is taken."""
        await self._set_up()
        site = web.TCPSite(
            self._runner, bare_host(host), port, reuse_port=shares_port, backlog=BACKLOG, ssl_context=tls
        )
        await self._listen(site, join_address(host, port))
        if shares_port:
            self._handed_over.append(site)
        return join_address(host, site.port)

    async def listen_to_fabric(self, host: str, tls: ssl.SSLContext | None, trust: FabricTrust) -> str:
        """Listen for the processes of the fabric, on a free port: orchestrators are believed for whom they ask. Returns
        "host:port". Raises StartError."""
        server = _Server(self._edge, checking(self._edge.callers, trust))
        self._fabric = web.ServerRunner(server, shutdown_timeout=self._shutdown_seconds)
        await self._fabric.setup()
        site = web.TCPSite(self._fabric, bare_host(host), 0, backlog=BACKLOG, ssl_context=tls)
        await self._listen(site, join_address(host, 0))
        return join_address(host, site.port)

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
        """Let running requests finish within the drain timeout, while /ready returns 503 and new requests are rejected
        with 503. If a successor continues to use the socket, requests that arrive over existing connections are served
        before these connections are closed. `on_leave` is called some time before this server stops accepting from that
        socket."""
        try:
            async with asyncio.timeout(self._edge.drain_timeout_seconds):
                if self._handed_over:
                    on_leave()
                    self._edge.admission.leaving = True
                    self._edge.sockets.leave()
                    await asyncio.sleep(ANNOUNCED_SECONDS)
                    for site in self._handed_over:
                        await site.stop()
                    await self._end_connections()
                self._edge.admission.drain()
                self._edge.sockets.leave()
                await self._edge.admission.wait_idle()
        except TimeoutError:
            self._edge.admission.drain()
            log.warning("drain_timed_out", num_running=self._edge.admission.num_running)

    async def _end_connections(self) -> None:
        loop = asyncio.get_running_loop()
        idle_since = loop.time()
        while loop.time() < idle_since + LEAVE_SECONDS:
            # aiohttp does not report when a connection ends, nor when one that was just accepted begins.
            await asyncio.sleep(LEAVE_POLL_SECONDS)
            if not self._connections.connections:
                return
            if self._edge.admission.num_running:
                idle_since = loop.time()

    async def stop(self) -> None:
        """Close all connections. Requests that still run are cancelled, in the engine too."""
        if self._edge.summaries is not None:
            await self._edge.summaries.close()
        await self._edge.resume.close()
        await self._edge.idempotent_answers.close()
        await self._runner.cleanup()
        if self._fabric is not None:
            await self._fabric.cleanup()
