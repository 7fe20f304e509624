"""Keeps an event loop's thread on one CPU, whose caches then still hold the loop's working set.

Edges and routers work for a fraction of a millisecond a hundred times a second. Without this, Linux wakes them on any
idle CPU, and each finds the other's data in the caches: a token of 64 streams costs a fifth more
(docs/operate/performance.md).

This reserves no CPU. Where other processes keep it busy, the thread is released within a second, and is moved to the
next CPU later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import structlog

from kvloom.backoff import Backoff
from kvloom_common.process.aligned_timer import seconds_to_aligned_tick

MAX_WAITING_SHARE: Final = 0.1
"""A thread that is ready to run, and waits for its CPU for a larger share of the time than this, is released."""
MIN_PAUSE_SECONDS: Final = 10.0
MAX_PAUSE_SECONDS: Final = 320.0
LONG_STAY_SECONDS: Final = 60.0
CHECK_SECONDS: Final = 1.0

_TIMES = Path("/proc/thread-self/schedstat")

log = structlog.get_logger()


class CpuChoice:
    """Chooses the CPUs that a thread may use, by how long it has waited for them. A pure policy: it sets no affinity
    itself."""

    def __init__(self, cpus: Sequence[int], first: int) -> None:
        """`first`: the index of the CPU to try first, modulo the number of CPUs."""
        self._cpus = cpus
        self._index = first % len(cpus)
        self._held_seconds: float | None = None
        self._backoff = Backoff(MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS, stable_seconds=LONG_STAY_SECONDS)
        self._pause_left = 0.0

    def after(self, seconds: float, waited_seconds: float) -> Sequence[int] | None:
        """Called when `seconds` have passed, in which the thread was ready to run but did not for `waited_seconds`.
        Returns the CPUs that the thread may use from now on; None: no change."""
        if self._held_seconds is not None:
            self._held_seconds += seconds
            return self._release(self._held_seconds) if waited_seconds > MAX_WAITING_SHARE * seconds else None
        self._pause_left -= seconds
        if self._pause_left > 0:
            return None
        self._held_seconds = 0.0
        return [self._cpus[self._index]]

    def _release(self, held_seconds: float) -> Sequence[int]:
        self._pause_left = self._backoff.next_seconds(held_seconds)
        self._held_seconds = None
        self._index = (self._index + 1) % len(self._cpus)
        return self._cpus


def instance_number(process_name: str) -> int:
    """The number at the end of a process name such as "edge-2"; 0 if there is none."""
    digits = re.search(r"[0-9]{1,9}$", process_name)
    return int(digits.group()) if digits else 0


def use_every_cpu() -> None:
    """Undo the confinement in a thread that was started by a confined one and has inherited it."""
    if _process_cpus:
        os.sched_setaffinity(0, _process_cpus)


@contextlib.contextmanager
def kept_on_one_cpu(first: int, *, wanted: bool = True, check_seconds: float = CHECK_SECONDS) -> Iterator[None]:
    """Keep the calling thread, which runs an event loop, on one CPU where possible. `first`: see CpuChoice."""
    if not wanted or len(_process_cpus) < 2 or not _TIMES.exists():
        yield
        return
    try:
        # Opened once: while the process is short of descriptors, it could not be opened at each check.
        times = os.open(_TIMES, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        log.warning("cpu_pinning_failed", error=str(error))
        yield
        return
    stay = _CpuPinning(CpuChoice(sorted(_process_cpus), first), check_seconds, times)
    try:
        yield
    finally:
        stay.end()
        os.close(times)


class _CpuPinning:
    def __init__(self, choice: CpuChoice, check_seconds: float, times: int) -> None:
        """`times`: a descriptor of the thread's schedstat."""
        self._times = times
        self._choice = choice
        self._check_seconds = check_seconds
        self._loop = asyncio.get_running_loop()
        self._checked_at, self._waited = self._loop.time(), _waited_seconds(times)
        self._timer = self._loop.call_later(self._seconds_to_check(), self._check)

    def end(self) -> None:
        self._timer.cancel()
        use_every_cpu()

    def _check(self) -> None:
        now, waited = self._loop.time(), _waited_seconds(self._times)
        cpus = self._choice.after(now - self._checked_at, waited - self._waited)
        self._checked_at, self._waited = now, waited
        if cpus is not None:
            try:
                os.sched_setaffinity(0, cpus)
            except OSError as error:  # the process may no longer use that CPU
                log.warning("cpu_pinning_failed", cpus=cpus, error=str(error))
                return
            log.info("cpus_assigned", cpus=cpus)
        self._timer = self._loop.call_later(self._seconds_to_check(), self._check)

    def _seconds_to_check(self) -> float:
        return seconds_to_aligned_tick(self._checked_at, self._check_seconds)


def _waited_seconds(times: int) -> float:
    """How long the thread has been ready to run without running, since it began."""
    return int(os.pread(times, 256, 0).split()[1]) / 1e9


_process_cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
"""The CPUs when this module was loaded, before any thread was confined."""
