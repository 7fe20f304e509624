"""The access log writes the ends of all requests, of a sample or of none; failures at their rate are bounded too."""

from __future__ import annotations

import math
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import PurePath
from typing import Final

import structlog

from kvloom_common.config import LogConfig

_NUM_DRAWS: Final = 2**32


class AccessLog:
    """The same requests are in the sample of every process, because the sample is drawn by the request's id."""

    __slots__ = ("_sample_limit", "is_on")

    def __init__(self, config: LogConfig) -> None:
        self.is_on = config.access == "on" and config.access_sample_share > 0
        self._sample_limit = int(config.access_sample_share * _NUM_DRAWS)

    def wants(self, request_id: str) -> bool:
        """True when this request is to be logged. `request_id` is the id that the caller gave it, or else the
        fabric's."""
        if self._sample_limit >= _NUM_DRAWS:
            return self.is_on
        return self.is_on and zlib.crc32(request_id.encode()) < self._sample_limit


NO_ACCESS_LOG: Final = AccessLog(LogConfig(access="off"))


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
