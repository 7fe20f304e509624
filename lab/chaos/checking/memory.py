"""Watches the resident memory of the processes over time."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final

from lab.process_counters import rss_bytes
from tools.supervisor.supervised_process import ProcessStatus

SAMPLE_SECONDS: Final = 5.0
MAX_SAMPLES: Final = 20_000
"""The largest number of samples of one process."""
MAX_WARM_UP_SECONDS: Final = 900.0
WARM_UP_SHARE: Final = 1 / 3
"""The first part of a process's samples, at most MAX_WARM_UP_SECONDS, is not counted as growth. After ten minutes
everything that is kept for a limited time (usage records, ended answers) has reached its size, and the allocator takes
some more memory until it has room for every mixture of it."""
FLAT_MB_PER_HOUR: Final = 1.0
FLAT_MB: Final = 0.5
"""Allocators take memory in pieces, so that a smaller rise over the whole time means nothing."""
MIN_JUDGED_SECONDS: Final = 1500.0
"""A process that was watched for less time is not judged: what is kept for a limited time had not reached its size."""
_NUM_BLOCKS: Final = 20
"""Successive samples are correlated. The means of so many blocks of them are treated as independent."""
_MIN_BLOCKS: Final = 5

Sample = tuple[float, int]
"""Seconds since the load began, bytes."""


@dataclasses.dataclass(slots=True)
class ProcessMemory:
    """The memory samples of one process."""

    name: str
    role: str
    samples: list[Sample] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.samples[-1][0] - self.samples[0][0]

    @property
    def warm_samples(self) -> list[Sample]:
        begin = self.samples[0][0] + min(MAX_WARM_UP_SECONDS, WARM_UP_SHARE * self.seconds)
        return [sample for sample in self.samples if sample[0] >= begin]


@dataclasses.dataclass(frozen=True, slots=True)
class Trend:
    """A line through samples, by least squares."""

    bytes_per_second: float
    error_bytes_per_second: float
    """Twice the slope's standard error."""
    seconds: float
    """The time that was watched."""

    @property
    def is_flat(self) -> bool:
        """True when the slope is at most FLAT_MB_PER_HOUR, or cannot be distinguished from noise."""
        surely = self.bytes_per_second - self.error_bytes_per_second
        rise_mb = self.bytes_per_second * self.seconds / 1e6
        return mb_per_hour(self.bytes_per_second) <= FLAT_MB_PER_HOUR or rise_mb <= FLAT_MB or surely <= 0.0


class MemorySamples:
    def __init__(self) -> None:
        self._processes: dict[int, ProcessMemory] = {}
        """Keyed by pid."""

    def sample(self, statuses: Iterable[ProcessStatus], at_seconds: float) -> None:
        for status in statuses:
            if status.pid is not None:
                self.note(status.pid, status.name, status.role, at_seconds, rss_bytes([status.pid]))

    def note(self, pid: int, name: str, role: str, at_seconds: float, num_bytes: int) -> None:
        process = self._processes.setdefault(pid, ProcessMemory(name, role))
        if num_bytes and len(process.samples) < MAX_SAMPLES:
            process.samples.append((at_seconds, num_bytes))

    def figures(self) -> list[dict[str, Any]]:
        """One row for each name: how many processes had it, and the memory of the longest-running one after warm-up."""
        by_name: dict[str, list[ProcessMemory]] = {}
        for process in self._processes.values():
            if process.samples:
                by_name.setdefault(process.name, []).append(process)
        return [_figures_of(processes) for _, processes in sorted(by_name.items())]

    def around(self, begin: float, end: float) -> list[dict[str, Any]]:
        """One row for each name: the last sample before `begin`, the most until `end`, and the last sample of all."""
        by_name: dict[str, list[Sample]] = {}
        pids: dict[str, int] = {}
        for process in self._processes.values():
            by_name.setdefault(process.name, []).extend(process.samples)
            pids[process.name] = pids.get(process.name, 0) + bool(process.samples)
        rows: list[dict[str, Any]] = []
        for name, samples in sorted(by_name.items()):
            samples.sort()
            before = [size for at, size in samples if at <= begin]
            during = [size for at, size in samples if begin < at <= end]
            if before and during:
                sizes = {"before_mb": before[-1], "most_mb": max(during), "after_mb": samples[-1][1]}
                row = {key: round(size / 1e6, 1) for key, size in sizes.items()}
                rows.append({"name": name, **row, "incarnations": pids[name]})
        return rows


def _figures_of(processes: Sequence[ProcessMemory]) -> dict[str, Any]:
    longest = max(processes, key=lambda process: process.seconds)
    warm = longest.warm_samples
    trend = trend_of(warm)
    return {
        "name": longest.name,
        "role": longest.role,
        "incarnations": len(processes),
        "seconds": round(warm[-1][0] - warm[0][0], 1),
        "start_mb": round(warm[0][1] / 1e6, 1),
        "end_mb": round(warm[-1][1] / 1e6, 1),
        "most_mb": round(max(size for process in processes for _, size in process.samples) / 1e6, 1),
        "stretches_mb": [round(size / 1e6, 2) for _, size in stretches_of(warm)],
        "slope_mb_per_hour": None if trend is None else round(mb_per_hour(trend.bytes_per_second), 2),
        "slope_error_mb_per_hour": None if trend is None else round(mb_per_hour(trend.error_bytes_per_second), 2),
        "is_flat": None if trend is None or longest.seconds < MIN_JUDGED_SECONDS else trend.is_flat,
    }


def soak_problems(figures: Iterable[dict[str, Any]]) -> list[str]:
    """Returns what happened that must not happen in a run without faults."""
    problems: list[str] = []
    for row in figures:
        if row["incarnations"] > 1:
            problems.append(f"{row['name']} was replaced although there was no fault: {row['incarnations']} processes")
        if row["is_flat"] is False:
            problems.append(
                f"{row['name']} grows by {row['slope_mb_per_hour']:g} MB an hour (uncertain by "
                f"{row['slope_error_mb_per_hour']:g}; allowed are {FLAT_MB_PER_HOUR:g}): "
                + " ".join(f"{size:g}" for size in row["stretches_mb"])
            )
    return problems


def mb_per_hour(bytes_per_second: float) -> float:
    """MB per hour."""
    return bytes_per_second * 3600 / 1e6


def stretches_of(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """The means of blocks of equal length."""
    size = max(1, len(samples) // _NUM_BLOCKS)
    blocks = [samples[at : at + size] for at in range(0, len(samples) - size + 1, size)]
    return [
        (statistics.fmean(at for at, _ in block), statistics.fmean(num_bytes for _, num_bytes in block))
        for block in blocks
    ]


def trend_of(samples: Sequence[Sample]) -> Trend | None:
    """None if there are too few samples."""
    stretches = stretches_of(samples)
    if len(stretches) < _MIN_BLOCKS:
        return None
    times, sizes = zip(*stretches, strict=True)
    slope, intercept = statistics.linear_regression(times, sizes)
    off = sum((y - intercept - slope * x) ** 2 for x, y in zip(times, sizes, strict=True)) / (len(stretches) - 2)
    mean = statistics.fmean(times)
    error = 2.0 * math.sqrt(off / sum((x - mean) ** 2 for x in times))
    return Trend(slope, error, samples[-1][0] - samples[0][0])
