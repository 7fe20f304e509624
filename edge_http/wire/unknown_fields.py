"""UnknownFields decides what this edge does with fields of requests that it does not know, and tells its operator."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from edge_http.wire.headers import STRICT
from kvloom_common.metrics.series import OTHER, LabelValues

log = structlog.get_logger()

MAX_NAMES: Final = 64
"""How many fields are counted by name; the names come from clients."""
SECONDS_BETWEEN_LINES: Final = 3600.0
_PLAIN_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


class UnknownFields:
    """The FieldRules (edge_http/formatting/body_fields.py) of one edge."""

    def __init__(self, count: Callable[[str], None], *, refuses_all: bool) -> None:
        """`count` counts a field that was left out."""
        self._count = count
        self._refuses_all = refuses_all
        self._names = LabelValues(MAX_NAMES)
        self._since: Counter[str] = Counter()
        """Those of the requests since the last line in the log."""
        self._next_line_at = 0.0

    def is_strict(self, headers: Mapping[str, str]) -> bool:
        given = headers.get(STRICT)
        return self._refuses_all if given is None else given.lower() == "true"

    def note(self, fields: Sequence[str]) -> None:
        for field in fields:
            name = self._names.fold(field) if _PLAIN_NAME.fullmatch(field) else OTHER
            self._count(name)
            self._since[name] += 1
        now = asyncio.get_running_loop().time()
        if now >= self._next_line_at:
            self._next_line_at = now + SECONDS_BETWEEN_LINES
            log.info("unknown_fields_ignored", fields=dict(self._since.most_common(MAX_NAMES)))
            self._since.clear()
