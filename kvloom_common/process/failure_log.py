"""Logs a failure that may occur at the rate of requests."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from pathlib import PurePath
from typing import Final

import structlog

log = structlog.get_logger()

LOG_SECONDS: Final = 60.0
"""The least time between two log lines."""


class FailureLog:
    """One line a minute at most, with the number of failures so far."""

    def __init__(self, event: str, now: Callable[[], float] = time.monotonic, **fields: object) -> None:
        self._event = event
        self._now = now
        self._fields = fields
        self._num_failures = 0
        self._logged_at = -math.inf

    def note(self, cause: str) -> None:
        self._num_failures += 1
        now = self._now()
        if now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            log.error(self._event, **self._fields, cause=cause, num_failures=self._num_failures)


def place_of(error: BaseException) -> str:
    """The type of an error and where it was raised. Its message is left out, because it may have text of a user."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"
