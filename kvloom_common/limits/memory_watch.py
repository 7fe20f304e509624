"""Measures the memory of this process about once a second, and refuses work before it is exhausted.

Nothing here runs on the path of a request: admission reads attributes that `on_level` has set.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from prometheus_client import CollectorRegistry

from kvloom_common.limits.memory_policy import MemoryLevel, MemoryPolicy
from kvloom_common.metrics.table import CounterRecord, GaugeRecord, MetricTable
from kvloom_common.process.freed_memory import return_freed_memory

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
