"""Resident memory of the processes over time."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final

from tools.process_counters import rss_bytes
from tools.supervised import ProcessStatus

SAMPLE_SECONDS: Final = 5.0
MAX_SAMPLES: Final = 20_000
"""Of a process."""


@dataclasses.dataclass(slots=True)
class Life:
    """One process, from the first sample to the last."""

    name: str
    role: str
    pid: int
    samples: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    """Seconds since the load began, bytes."""

    @property
    def seconds(self) -> float:
        return self.samples[-1][0] - self.samples[0][0]


class MemoryWatch:
    def __init__(self) -> None:
        self._lives: dict[int, Life] = {}

    def sample(self, statuses: Iterable[ProcessStatus], at_seconds: float) -> None:
        for status in statuses:
            if status.pid is None:
                continue
            life = self._lives.setdefault(status.pid, Life(status.name, status.role, status.pid))
            num_bytes = rss_bytes([status.pid])
            if num_bytes and len(life.samples) < MAX_SAMPLES:
                life.samples.append((at_seconds, num_bytes))

    def figures(self, warm_up_seconds: float) -> list[dict[str, Any]]:
        """Of each name the life that lasted longest, the first `warm_up_seconds` of it left out."""
        longest: dict[str, Life] = {}
        for life in self._lives.values():
            known = longest.get(life.name)
            if life.samples and (known is None or life.seconds > known.seconds):
                longest[life.name] = life
        return [_figures_of(life, warm_up_seconds) for _, life in sorted(longest.items())]


def _figures_of(life: Life, warm_up_seconds: float) -> dict[str, Any]:
    begin = life.samples[0][0] + warm_up_seconds
    warm = [sample for sample in life.samples if sample[0] >= begin] or life.samples[-1:]
    slope = slope_per_second(warm)
    return {
        "name": life.name,
        "role": life.role,
        "seconds": round(warm[-1][0] - warm[0][0], 1),
        "start_mb": round(warm[0][1] / 1e6, 1),
        "end_mb": round(warm[-1][1] / 1e6, 1),
        "growth_mb": round((warm[-1][1] - warm[0][1]) / 1e6, 2),
        "slope_mb_per_hour": None if slope is None else round(slope * 3600 / 1e6, 2),
    }


def slope_per_second(samples: Sequence[tuple[float, int]]) -> float | None:
    """Bytes per second, by least squares; None for what is too short to tell."""
    if len({at for at, _ in samples}) < 3:
        return None
    return statistics.linear_regression([at for at, _ in samples], [float(size) for _, size in samples]).slope
