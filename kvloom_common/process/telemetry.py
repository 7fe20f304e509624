"""Logs, set up the same way in every process."""

from __future__ import annotations

import logging
import sys

import structlog

from kvloom_common.config import LogConfig
from kvloom_common.process.log_lines import LineWriter, render_console, render_json, stamp
from kvloom_common.process.request_context import add_request_fields


def configure_logging(config: LogConfig, process: str) -> None:
    """Set structlog up to write to stderr. Every line has `process` (e.g. "router", "shard-0"). Prompts and tokens are
    never logged."""
    writer = LineWriter(sys.stderr, render_json if config.format == "json" else render_console, process)
    structlog.configure(
        processors=[add_request_fields, structlog.processors.format_exc_info, stamp],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[config.level.upper()]),
        logger_factory=lambda *_args: writer,
        cache_logger_on_first_use=True,
    )
