"""Bounds the number of series: each label value makes one, in the process and in Prometheus."""

from __future__ import annotations

from typing import Final

OTHER: Final = "other"
"""Stands for all values that have no series of their own."""
MAX_LABEL_VALUES: Final = 256


class LabelValues:
    """The values of one label that have a series of their own: the first that come. Later ones share `OTHER`."""

    def __init__(self, max_values: int = MAX_LABEL_VALUES) -> None:
        self._max_values = max_values
        self._values: set[str] = set()

    def fold(self, value: str) -> str:
        """The label value to count under."""
        if value not in self._values:
            if len(self._values) >= self._max_values:
                return OTHER
            self._values.add(value)
        return value
