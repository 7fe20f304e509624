"""Recorded arrivals, replayed at any rate."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from tools.simulate.workload import Call

_MAX_TICK_SECONDS: Final = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class OpenTrace:
    calls: Sequence[Call]
    timestamps: Sequence[float]
    """The time of each call in seconds after the first one."""
    tick_seconds: float
    """The resolution of the timestamps. A call arrived at any time within its tick."""
    block_size: int
    is_closed_loop: bool = False

    @property
    def num_calls(self) -> int:
        return len(self.calls)

    def workload(self, load: float, seed: int, max_requests: int | None = None) -> OpenLoopWorkload:
        """The first `max_requests` calls at `load` times their rate."""
        chooser = random.Random(f"arrivals {seed}")
        count = len(self.calls) if max_requests is None else min(max_requests, len(self.calls))
        arrivals = [
            ((self.timestamps[index] + chooser.random() * self.tick_seconds) / load, self.calls[index])
            for index in range(count)
        ]
        arrivals.sort(key=lambda arrival: arrival[0])
        return OpenLoopWorkload(self.block_size, arrivals)


@dataclasses.dataclass(slots=True)
class OpenLoopWorkload:
    block_size: int
    arrivals: Sequence[tuple[float, Call]]

    @property
    def num_measured_calls(self) -> int:
        return len(self.arrivals)

    def first_calls(self) -> Iterable[tuple[float, Call]]:
        return self.arrivals

    def next_calls(self, ended: Call, now: float) -> Iterable[tuple[float, Call]]:  # noqa: ARG002
        return ()


def tick_of(timestamps: Sequence[float]) -> float:
    """The resolution of recorded times: the usual distance of distinct times if most calls share theirs, otherwise
    0."""
    distinct = sorted(set(timestamps))
    if len(distinct) < 2 or 2 * len(distinct) > len(timestamps):
        return 0.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(distinct)]
    return min(statistics.median(gaps), _MAX_TICK_SECONDS)
