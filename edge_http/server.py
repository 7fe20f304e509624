"""The HTTP server: aiohttp's protocol without its application layer, so that a request meets one table and one handler,
and so that even a request that is not HTTP gets an error in OpenAI's form."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import structlog
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from edge_http.dispatch import Dispatcher
from edge_http.edge import Edge
from edge_http.json_response import error_response
from kvloom.errors import KvloomError, invalid_argument
from kvloom.service import StartError
from kvloom.v1.error_reason_pb2 import ErrorReason

log = structlog.get_logger()

KEEPALIVE_SECONDS: Final = 75.0
"""Idle connections are closed after this; longer than load balancers' usual 60 s, so that they close first."""
LINGER_SECONDS: Final = 2.0
"""How long the rest of a refused body is read, so that its sender sees the answer."""
MAX_HEADERS: Final = 100
BACKLOG: Final = 1024
SHUTDOWN_SECONDS: Final = 1.0


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,  # noqa: ARG002
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002
    ) -> web.StreamResponse:
        """What is not well-formed HTTP ends here; the connection is closed."""
        if isinstance(exc, LineTooLong):
            error = KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, "The request line or a header is too long.")
        elif status < 500:
            error = invalid_argument("The request is not valid HTTP.")
        else:
            log.error("connection broke", exc_info=exc)
            error = KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "Something went wrong on our side.")
        response = error_response(error)
        response.force_close()
        return response


class _Server(web.Server):
    def __init__(self, edge: Edge) -> None:
        # Cancelling handlers is how a client that goes away ends its request.
        super().__init__(Dispatcher(edge), handler_cancellation=True)
        self._options: dict[str, Any] = {
            "keepalive_timeout": KEEPALIVE_SECONDS,
            "lingering_time": LINGER_SECONDS,
            "max_line_size": edge.config.max_header_bytes,
            "max_field_size": edge.config.max_header_bytes,
            "max_headers": MAX_HEADERS,
            "auto_decompress": False,
            "access_log": None,
        }

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._options)


class EdgeServer:
    """An Edge that listens."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._runner = web.ServerRunner(_Server(edge), shutdown_timeout=SHUTDOWN_SECONDS)

    async def start(self, host: str, port: int) -> str:
        """Listen; port 0 picks one. Returns "host:port". Raises StartError when the port is taken."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, reuse_port=False, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        return f"{host}:{site.port}"

    async def drain(self) -> None:
        """Refuse new requests (they and /ready get 503), let running ones finish within the drain timeout."""
        self._edge.drain()
        try:
            async with asyncio.timeout(self._edge.config.drain_timeout_seconds):
                await self._edge.wait_idle()
        except TimeoutError:
            log.warning("drain timed out", num_running=self._edge.num_running)

    async def stop(self) -> None:
        """Close all connections; what still runs is cancelled, in the engine too."""
        await self._edge.resume.close()
        await self._runner.cleanup()
