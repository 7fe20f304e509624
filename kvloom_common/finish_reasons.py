"""The names of finish reasons, as logs, metrics, records and traces have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvloom.v1.generation_pb2 import FinishReason

FINISH_REASON_NAMES: Final[Mapping[int, str]] = {
    value: name.removeprefix("FINISH_REASON_").lower() for name, value in FinishReason.items()
}
"""E.g. "stop" for FINISH_REASON_STOP."""
