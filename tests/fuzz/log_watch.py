"""Finds what a process must not log, whatever it is sent: stack traces, and errors, which operators would look into."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import MutableMapping
from typing import Any

import structlog


class LogWatch(logging.Handler):
    """Receives the log lines of both logging libraries while it is started."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.events: list[MutableMapping[str, Any]] = []
        """What kvloom has logged since the last `clear`."""
        self._faults: list[str] = []
        self._configuration_before: dict[str, Any] = {}

    def start(self) -> None:
        logging.getLogger().addHandler(self)
        self._configuration_before = structlog.get_config()
        structlog.configure(processors=[self._on_event])

    def stop(self) -> None:
        logging.getLogger().removeHandler(self)
        structlog.configure(**self._configuration_before)

    def clear(self) -> None:
        self.events.clear()
        self._faults.clear()

    def check(self) -> None:
        assert not self._faults, "\n".join(self._faults)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self._faults.append(self.format(record))

    def _on_event(self, _logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        self.events.append(event)
        exception = event.get("exc_info")
        if exception or method in ("error", "critical", "exception"):
            shown = "".join(traceback.format_exception(exception)) if isinstance(exception, BaseException) else ""
            shown = shown or (traceback.format_exc() if exception else "")
            self._faults.append(f"{method}: {dict(event)}\n{shown}")
        raise structlog.DropEvent

    def on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        shown = "".join(traceback.format_exception(error)) if error is not None else ""
        self._faults.append(f"event loop: {context.get('message')}\n{shown}")
