"""The names of finish reasons, as logs, metrics, records and traces have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvloom.v1.generation_pb2 import FinishReason


class _Names(dict[int, str]):
    def __missing__(self, reason: int) -> str:
        """A newer peer may send a reason that this process does not know."""
        return self[0]


FINISH_REASON_NAMES: Final[Mapping[int, str]] = _Names(
    {value: name.removeprefix("FINISH_REASON_").lower() for name, value in FinishReason.items()}
)
"""E.g. "stop" for FINISH_REASON_STOP."""
