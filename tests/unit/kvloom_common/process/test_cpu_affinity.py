"""An event loop's thread keeps to one CPU, and leaves a CPU that other processes use."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable

import pytest

from kvloom_common.process.cpu_affinity import (
    LONG_STAY_SECONDS,
    MAX_PAUSE_SECONDS,
    MAX_WAITING_SHARE,
    MIN_PAUSE_SECONDS,
    CpuChoice,
    instance_number,
    kept_on_one_cpu,
    use_every_cpu,
)

CPUS = [2, 5, 7]
TIMEOUT_SECONDS = 20.0
two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is only one CPU to stay on")


def test_a_thread_takes_the_cpu_of_its_number_and_keeps_it():
    """The processes of one fabric are numbered, so that they spread without knowing each other."""
    assert CpuChoice(CPUS, 0).after(1.0, 0.0) == [2]
    assert CpuChoice(CPUS, 4).after(1.0, 0.0) == [5]
    choice = CpuChoice(CPUS, -1)
    assert choice.after(1.0, 0.9) == [7], "it had waited before it had a CPU"
    assert all(choice.after(1.0, MAX_WAITING_SHARE * 0.9) is None for _ in range(1000))


def test_a_busy_cpu_is_let_go_at_once_and_another_one_tried_later():
    """A thread that waits is worse off than one with cold caches."""
    choice = CpuChoice(CPUS, 2)
    assert choice.after(1.0, 0.0) == [7]
    assert choice.after(1.0, 0.5) == CPUS
    waited = 0
    while (cpus := choice.after(1.0, 0.5)) is None:
        waited += 1
    assert (cpus, waited + 1) == ([2], MIN_PAUSE_SECONDS)


def test_pauses_grow_while_no_cpu_is_free_and_restart_after_a_long_stay():
    """On a machine that is busy for hours, trying every ten seconds gains nothing."""
    choice = CpuChoice(CPUS, 0)

    def pause() -> float:
        assert choice.after(1.0, 1.0) == CPUS
        seconds = 1.0
        while choice.after(1.0, 1.0) is None:
            seconds += 1.0
        return seconds

    choice.after(1.0, 0.0)
    assert [pause() for _ in range(7)] == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, MAX_PAUSE_SECONDS]
    choice.after(LONG_STAY_SECONDS, 0.0)
    assert pause() == MIN_PAUSE_SECONDS


def test_a_process_is_numbered_by_the_end_of_its_name():
    """The supervisor names a single process by its role."""
    assert [instance_number(name) for name in ("edge", "edge-0", "edge-12", "router-3")] == [0, 0, 12, 3]


async def until(holds: Callable[[], bool]) -> None:
    """Iterations of the loop, one after the other, keep it busy meanwhile."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not holds():  # noqa: ASYNC110  (the kernel sends no event)
            await asyncio.sleep(0)


@two_cpus
async def test_the_loop_stays_and_threads_that_it_starts_need_not():
    """A tokenizer's thread on the loop's CPU would hold up every token."""
    every = os.sched_getaffinity(0)
    with kept_on_one_cpu(-1, check_seconds=0.01):
        await until(lambda: os.sched_getaffinity(0) == {max(every)})
        seen: list[set[int]] = []
        thread = threading.Thread(target=lambda: (use_every_cpu(), seen.append(os.sched_getaffinity(0))))
        thread.start()
        thread.join(TIMEOUT_SECONDS)
        assert seen == [every]
    assert os.sched_getaffinity(0) == every


@two_cpus
async def test_the_loop_leaves_a_cpu_that_another_process_keeps_busy():
    """Uses the kernel's own measurements, not values that the test makes up."""
    every = os.sched_getaffinity(0)
    first = sorted(every)[0]
    hog = f"import os\nos.sched_setaffinity(0, {{{first}}})\nprint(flush=True)\nwhile True: pass"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", hog, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readline(), TIMEOUT_SECONDS)
        with kept_on_one_cpu(0, check_seconds=0.1):
            await until(lambda: os.sched_getaffinity(0) == {first})
            await until(lambda: os.sched_getaffinity(0) == every)
    finally:
        process.kill()
        await process.communicate()


async def test_nothing_is_done_unless_it_is_wanted():
    """Operators may have placed the processes themselves."""
    every = os.sched_getaffinity(0)
    with kept_on_one_cpu(0, wanted=False, check_seconds=0.0):
        await asyncio.sleep(0.01)  # sleep: what must not be done would be by then
        assert os.sched_getaffinity(0) == every
