"""Logs and metrics, set up the same way in every process."""

from __future__ import annotations

import functools
import logging
import socket
import sys
import threading
from typing import Final
from wsgiref.simple_server import WSGIRequestHandler, make_server

import prometheus_client
import structlog
from prometheus_client.exposition import ThreadingWSGIServer

from kvloom.config import LogConfig
from kvloom.process.log_lines import LineWriter, render_console, render_json
from kvloom.process.request_context import add_request_fields

_LOOK_SECONDS: Final = 3600.0
"""How often a metrics thread wakes up to check whether to stop, which it never has to. The thread of
prometheus_client's own start_http_server wakes up twice a second."""


def configure_logging(config: LogConfig, process: str) -> None:
    """Set structlog up to write to stderr. Every line has `process` (e.g. "router", "shard-0"). Prompts and tokens are
    never logged."""
    renderer: structlog.typing.Processor = render_json if config.format == "json" else render_console
    writer = LineWriter(sys.stderr)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add_request_fields,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[config.level.upper()]),
        logger_factory=lambda *_args: writer,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)


def serve_metrics(host: str, port: int) -> int:
    """Expose this process's metrics at http://host:port/metrics, from a thread. Port 0 picks a free one. Returns the
    port."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    server_type = type("MetricsServer", (ThreadingWSGIServer,), {"address_family": family})
    server = make_server(str(address[0]), port, prometheus_client.make_wsgi_app(), server_type, _QuietHandler)
    serve = functools.partial(server.serve_forever, poll_interval=_LOOK_SECONDS)
    threading.Thread(target=serve, name="metrics", daemon=True).start()
    return server.server_port


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing: otherwise each scrape would write a line."""
