"""Keeps an event loop's thread on one CPU, whose caches then still hold what it works with.

Edges and routers work for a fraction of a millisecond a hundred times a second. Left alone, Linux wakes them on
whichever CPU is idle, and each finds there what the other has left: a token of 64 streams costs a fifth more
(docs/performance.md).

No CPU is reserved by this. Where others keep it busy, the thread is let go within a second, and tries the next one
later.
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

from kvloom.process.aligned_timer import seconds_to_aligned_tick

MAX_WAITING_SHARE: Final = 0.1
"""Of the time: longer, ready to run, a thread does not wait for its CPU."""
MIN_PAUSE_SECONDS: Final = 10.0
MAX_PAUSE_SECONDS: Final = 320.0
LONG_STAY_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 1.0

_TIMES = Path("/proc/thread-self/schedstat")

log = structlog.get_logger()


class CpuChoice:
    """Which CPUs a thread may use, by how long it has waited for them. Does nothing itself."""

    def __init__(self, cpus: Sequence[int], first: int) -> None:
        """`first`: index of the one to try first, counted round."""
        self._cpus = cpus
        self._index = first % len(cpus)
        self._held_seconds: float | None = None
        self._pause_seconds = 0.0
        self._pause_left = 0.0

    def after(self, seconds: float, waited_seconds: float) -> Sequence[int] | None:
        """`seconds` have passed, of which the thread was ready to run for `waited_seconds` and did not. Returns the
        CPUs it may use from now on; None: those of before."""
        if self._held_seconds is not None:
            self._held_seconds += seconds
            return self._let_go(self._held_seconds) if waited_seconds > MAX_WAITING_SHARE * seconds else None
        self._pause_left -= seconds
        if self._pause_left > 0:
            return None
        self._held_seconds = 0.0
        return [self._cpus[self._index]]

    def _let_go(self, held_seconds: float) -> Sequence[int]:
        is_first = self._pause_seconds == 0 or held_seconds >= LONG_STAY_SECONDS
        self._pause_seconds = MIN_PAUSE_SECONDS if is_first else min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)
        self._pause_left = self._pause_seconds
        self._held_seconds = None
        self._index = (self._index + 1) % len(self._cpus)
        return self._cpus


def number_of(process_name: str) -> int:
    """The one at its end; 0: none."""
    digits = re.search(r"[0-9]{1,9}$", process_name)
    return int(digits.group()) if digits else 0


def use_every_cpu() -> None:
    """For a thread that was started by one that stays on a CPU, and would stay there, too."""
    if _process_cpus:
        os.sched_setaffinity(0, _process_cpus)


@contextlib.contextmanager
def staying_on_a_cpu(first: int, *, wanted: bool = True, look_seconds: float = LOOK_SECONDS) -> Iterator[None]:
    """The calling thread, which runs an event loop, stays on a CPU where it can. `first`: see CpuChoice."""
    if not wanted or len(_process_cpus) < 2 or not _TIMES.exists():
        yield
        return
    stay = _Stay(CpuChoice(sorted(_process_cpus), first), look_seconds)
    try:
        yield
    finally:
        stay.end()


class _Stay:
    def __init__(self, choice: CpuChoice, look_seconds: float) -> None:
        self._choice = choice
        self._look_seconds = look_seconds
        self._loop = asyncio.get_running_loop()
        self._looked_at, self._waited = self._loop.time(), _waited_seconds()
        self._timer = self._loop.call_later(self._seconds_to_look(), self._look)

    def end(self) -> None:
        self._timer.cancel()
        use_every_cpu()

    def _look(self) -> None:
        now, waited = self._loop.time(), _waited_seconds()
        cpus = self._choice.after(now - self._looked_at, waited - self._waited)
        self._looked_at, self._waited = now, waited
        if cpus is not None:
            try:
                os.sched_setaffinity(0, cpus)
            except OSError as error:  # somebody has taken that CPU from this process
                log.warning("event loop does not stay on a CPU", cpus=cpus, error=str(error))
                return
            log.info("event loop may use CPUs", cpus=cpus)
        self._timer = self._loop.call_later(self._seconds_to_look(), self._look)

    def _seconds_to_look(self) -> float:
        return seconds_to_aligned_tick(self._looked_at, self._look_seconds)


def _waited_seconds() -> float:
    """So long the calling thread has been ready to run and did not, since it began."""
    return int(_TIMES.read_bytes().split()[1]) / 1e9


_process_cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
"""When this module was loaded, before any thread was confined."""
