"""Measures the memory of this process about once a second, and refuses work before it is exhausted. A policy decides
when that is, and when it is worth returning freed memory to the system.

Nothing here runs on the path of a request: admission reads attributes that `on_level` has set.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from prometheus_client import CollectorRegistry

from kvloom_common.metrics.table import CounterRecord, GaugeRecord, MetricTable
from kvloom_common.process.freed_memory import return_freed_memory

HIGH_SHARE: Final = 0.85
"""The part of the limit at which the process begins to refuse large work."""
RECOVERED_SHARE: Final = 0.95
"""A level ends when the memory has fallen below this part of where the level begins, so that it does not flicker."""
LARGE_BYTES: Final = 64 * 2**10
"""Work that holds more than this is large."""
RETURN_BYTES: Final = 16 * 2**20
"""How much the memory must have grown since freed memory was last returned."""
STEADY_BYTES: Final = 4 * 2**20
"""Memory that changes by less than this between two samples is steady: no burst is under way."""
NUM_STEADY_SAMPLES: Final = 2
CHECK_SAMPLES: Final = 4
"""After so many samples it is tried once more, because the end of a burst may have freed memory since."""


class MemoryLevel(enum.IntEnum):
    """How close a process is to its limit."""

    NORMAL = 0
    HIGH = 1
    """Large work is refused, and caches are released."""
    FULL = 2
    """All new work is refused. Running answers continue."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryVerdict:
    """The consequences of a sample."""

    level: MemoryLevel
    returns_memory: bool
    """True when freed memory should be returned to the system now."""


class MemoryPolicy:
    """Sees the resident memory of one process, at regular intervals."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.level = MemoryLevel.NORMAL
        self._begins_at = {MemoryLevel.HIGH: round(max_bytes * HIGH_SHARE), MemoryLevel.FULL: max_bytes}
        self._settled_bytes: int | None = None
        """The memory after freed memory was last returned."""
        self._last_bytes = 0
        self._num_steady = 0
        self._num_until_check = 0
        """0: no check is due."""

    def observe(self, resident_bytes: int) -> MemoryVerdict:
        self.level = self._next_level(resident_bytes)
        return MemoryVerdict(self.level, self._is_time_to_return(resident_bytes))

    def returned(self, resident_bytes: int) -> None:
        """Freed memory has been returned; so much is left."""
        has_grown = self._settled_bytes is not None and self._last_bytes - self._settled_bytes >= RETURN_BYTES
        was_worth_it = self._last_bytes - resident_bytes >= STEADY_BYTES
        self._num_until_check = CHECK_SAMPLES if has_grown or was_worth_it else 0
        self._settled_bytes = self._last_bytes = resident_bytes

    def _next_level(self, resident_bytes: int) -> MemoryLevel:
        for level in (MemoryLevel.FULL, MemoryLevel.HIGH):
            share = RECOVERED_SHARE if self.level >= level else 1.0
            if resident_bytes >= self._begins_at[level] * share:
                return level
        return MemoryLevel.NORMAL

    def _is_time_to_return(self, resident_bytes: int) -> bool:
        """In quiet times after growth. Above the normal level it does not wait for them: most of the memory may be
        free already, and the process refuses work because of it."""
        is_steady = abs(resident_bytes - self._last_bytes) < STEADY_BYTES
        self._num_steady = self._num_steady + 1 if is_steady else 0
        self._last_bytes = resident_bytes
        if self._settled_bytes is None or resident_bytes < self._settled_bytes:
            self._settled_bytes = resident_bytes
        if self.level > MemoryLevel.NORMAL:
            return True
        if self._num_until_check:
            self._num_until_check -= 1
            if not self._num_until_check:
                return True
        return self._num_steady >= NUM_STEADY_SAMPLES and resident_bytes - self._settled_bytes >= RETURN_BYTES


log = structlog.get_logger()

SAMPLE_SECONDS: Final = 1.0
DEFAULT_SHARE: Final = 0.25
"""The share of the machine's memory, or of the cgroup's if that is less, that a process may have by default."""
_PAGE_BYTES: Final = resource.getpagesize()


def memory_limit_bytes(configured_bytes: int) -> int:
    """The limit of a process: what is configured, or with 0 a share of the memory that there is."""
    return configured_bytes or round(_total_memory_bytes() * DEFAULT_SHARE)


def _total_memory_bytes() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


class ResidentMemory:
    """Reads this process's resident memory. The file stays open, so that it works without a free descriptor."""

    def __init__(self) -> None:
        self._descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> int:
        return int(os.pread(self._descriptor, 128, 0).split()[1]) * _PAGE_BYTES

    def close(self) -> None:
        os.close(self._descriptor)


class MemoryRecords(NamedTuple):
    """The metrics of a process whose memory is watched."""

    role: str
    limit: GaugeRecord
    level: GaugeRecord
    returns: CounterRecord

    @classmethod
    def of(cls, table: MetricTable) -> MemoryRecords:
        """Adds them to the table of an edge or router."""
        name = f"kvloom_{table.role}_memory"
        return cls(
            table.role,
            table.gauge(f"{name}_limit_bytes", "bytes", "The memory that this process may have."),
            table.gauge(
                f"{name}_level", "levels", "How short memory is: 0 for enough, 1 refuses large work, 2 all new work."
            ),
            table.counter(f"{name}_returns", "returns", "How many times freed memory was returned to the system."),
        )


class MemoryWatch:
    """Call `watch` once. `on_level` is called when the level changes."""

    def __init__(
        self,
        metrics: MemoryRecords,
        max_bytes: int,
        on_level: Callable[[MemoryLevel], None],
        registry: CollectorRegistry,
        is_idle: Callable[[], bool],
        read_resident: Callable[[], int] | None = None,
        sample_seconds: float = SAMPLE_SECONDS,
    ) -> None:
        """`max_bytes` is the limit, 0 for a share of the
        machine's memory. `is_idle`: whether no request runs. `read_resident` returns the process's memory; None: as the
        system counts it. It is read every `sample_seconds`."""
        self._policy = MemoryPolicy(memory_limit_bytes(max_bytes))
        self._on_level = on_level
        self._is_idle = is_idle
        self._read_resident = read_resident
        self._sample_seconds = sample_seconds
        self._component = metrics.role
        metrics.limit.gauge(registry).set(self._policy.max_bytes)
        self._level = metrics.level.gauge(registry)
        self._returns = metrics.returns.series(registry)

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        with contextlib.ExitStack() as cleanup:
            read = self._read_resident
            if read is None:
                memory = ResidentMemory()
                cleanup.callback(memory.close)
                read = memory.read
            while True:
                await self._sample(read)
                await asyncio.sleep(self._sample_seconds)

    async def _sample(self, read: Callable[[], int]) -> None:
        resident_bytes, before = read(), self._policy.level
        verdict = self._policy.observe(resident_bytes)
        if verdict.level != before:
            self._level.set(verdict.level)
            self._on_level(verdict.level)
            tell = log.warning if verdict.level > before else log.info
            tell(
                "memory_level_changed",
                component=self._component,
                level=verdict.level.name.lower(),
                resident_mb=resident_bytes >> 20,
                limit_mb=self._policy.max_bytes >> 20,
            )
        if verdict.returns_memory:
            # gRPC leaves a cycle behind every RPC, with its messages. To find the old ones takes as long as there are
            # live objects: milliseconds while no request runs.
            gc.collect(2 if self._is_idle() else 1)
            await asyncio.to_thread(return_freed_memory)
            self._returns.inc()
            self._policy.returned(read())
