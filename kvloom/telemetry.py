"""Logs and metrics, set up the same way in every process."""

from __future__ import annotations

import logging
import sys

import prometheus_client
import structlog

from kvloom.config import LogConfig
from kvloom.log_lines import LineWriter, render_console, render_json


def configure_logging(config: LogConfig, process: str) -> None:
    """structlog on stderr; every line carries `process` (e.g. "router", "shard-0"). Never logs prompts or tokens."""
    renderer: structlog.typing.Processor = render_json if config.format == "json" else render_console
    writer = LineWriter(sys.stderr)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
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
    """Expose this process's metrics at http://host:port/metrics (from a thread); 0 picks a port. Returns the port."""
    server, _ = prometheus_client.start_http_server(port, addr=host)
    return int(server.server_port)
