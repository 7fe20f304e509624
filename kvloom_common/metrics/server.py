"""The listener of /metrics of routers, shards and the safety service, in threads of its own, so that a slow scraper
keeps no token waiting. Where clients need API keys or TLS, scrapers need them as well.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
import prometheus_client
import structlog

from kvloom.errors import KvloomError
from kvloom_common.access.auth_provider import Credentials
from kvloom_common.access.exposure import exposure_risk
from kvloom_common.access.listener_tls import listener_tls
from kvloom_common.addresses import bare_host, join_address
from kvloom_common.callers import Callers, bare_credential, configured_scrapers
from kvloom_common.config import KvloomConfig
from kvloom_common.process.service import StartError
from kvloom_common.process.watched_files import following

log = structlog.get_logger()

SCRAPE_SECONDS: Final = 10.0
"""How long a scraper may take for its handshake, for each read and for each write."""
MAX_SCRAPES: Final = 16
"""Connections served at a time. Further ones are closed at once."""
_ACCEPT_AGAIN_SECONDS: Final = 0.2
"""The wait after a connection could not be accepted, for example because no descriptor is free."""

_Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MetricsServer:
    """Serves the metrics of this process at `address`, from its construction until `close`."""

    def __init__(self, config: KvloomConfig, port: int, *, shares_port: bool = False) -> None:
        """Listens on `metrics.host`; port 0 picks a free one. With `shares_port`, a successor may listen on the same
        port. Raises StartError, and ConfigError if the files with keys or certificates cannot be used."""
        host = config.metrics.host
        if risk := exposure_risk(config, host, is_for_scrapers=True):
            raise StartError(f"metrics.host: {risk}")
        self._tls = listener_tls(config.tls)
        self._callers = configured_scrapers(config)
        self._closing = False
        try:
            family, *_, address = socket.getaddrinfo(
                bare_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            server_type = type("Server", (_Server,), {"address_family": family, "allow_reuse_port": shares_port})
            self._server = make_server(str(address[0]), port, self._app(), server_type, _Handler)
        except OSError as error:
            raise StartError(
                f"cannot serve metrics on {join_address(host, port)}: {error.strerror or error}"
            ) from error
        if self._tls is not None:
            self._server.tls = self._tls.http_context()
        self.address = join_address(host, self._server.server_port)
        threading.Thread(target=self._run, name="metrics", daemon=True).start()

    def _app(self) -> _Wsgi:
        app: _Wsgi = prometheus_client.make_wsgi_app()
        return _for_known_callers(app, self._callers) if self._callers.are_authenticated else app

    def _run(self) -> None:
        while not self._closing:
            self._server.handle_request()
        self._server.server_close()

    async def watch(self) -> None:
        """Follow changes of keys and certificates until cancelled."""
        async with following(*filter(None, (self._tls, self._callers.watched))):
            await asyncio.Event().wait()

    def close(self) -> None:
        """Accept no more scrapes; those that have begun are answered."""
        if not self._closing:
            self._closing = True
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it


def _for_known_callers(app: _Wsgi, callers: Callers) -> _Wsgi:
    def checked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            _check(environ, callers)
        except KvloomError as error:
            headers = [("Content-Type", "application/json"), ("WWW-Authenticate", "Bearer")]
            start_response(f"{error.kind.http_status} {HTTPStatus(error.kind.http_status).phrase}", headers)
            return [msgspec.json.encode(error.to_openai())]
        return app(environ, start_response)

    return checked


def _check(environ: dict[str, Any], callers: Callers) -> None:
    """Raises KvloomError."""
    if callers.verifier is None:
        callers.check(bare_credential(environ.get("HTTP_AUTHORIZATION", ""), environ.get("HTTP_X_API_KEY", "")))
        return
    named = {name: f"HTTP_{name.upper().replace('-', '_')}" for name in callers.verifier.headers}
    headers = {name: environ[variable] for name, variable in named.items() if variable in environ}
    callers.verifier.verify_in_thread(Credentials(headers))


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, within limits."""

    daemon_threads = True  # it would otherwise keep a list of all that have ended
    tls: ssl.SSLContext | None = None
    request_queue_size = 2 * MAX_SCRAPES  # with the library's 5, connections made at once wait for a second or more

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._free = threading.BoundedSemaphore(MAX_SCRAPES)
        super().__init__(*args, **kwargs)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_ACCEPT_AGAIN_SECONDS)  # the thread would otherwise try again without a pause
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(SCRAPE_SECONDS)
        with self.tls.wrap_socket(request, server_side=True) as wrapped:
            super().finish_request(wrapped, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Called while the exception is handled. Scrapers that leave, or fail in TLS, are no fault of this process."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("scrape_failed")


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_SECONDS

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing: otherwise each scrape would write a line."""
