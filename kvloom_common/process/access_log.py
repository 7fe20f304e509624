"""Decides if the end of a request is logged: of every request, of a sample, or of none (`log.access`)."""

from __future__ import annotations

import zlib
from typing import Final

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
