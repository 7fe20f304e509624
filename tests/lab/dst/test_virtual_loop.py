"""The event loop in which simulated processes run coroutines of the product."""

from __future__ import annotations

import asyncio

import pytest

from lab.dst.checker import Violation
from lab.dst.timeline import Timeline
from lab.dst.virtual_loop import VirtualLoop

START = 100.0


async def ticks(log: list[float]) -> None:
    """Logs the time of every second."""
    try:
        while True:
            await asyncio.sleep(1.0)
            log.append(asyncio.get_running_loop().time() - START)
    finally:
        log.append(-1.0)


def test_time_passes_as_fast_as_the_timeline_does() -> None:
    """Timeouts of minutes must not take minutes, and come in their order."""
    timeline, log = Timeline(START), []
    loop = VirtualLoop(timeline)

    async def wait() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60.0):
                await asyncio.Event().wait()
        log.extend(await asyncio.gather(asyncio.sleep(2.0, "slow"), asyncio.sleep(1.0, "fast")))
        log.append(loop.time() - START)

    loop.start(wait())
    timeline.run_until(START + 61.9)
    assert not log
    timeline.run_until(START + 62.0)
    assert log == ["slow", "fast", 62.0]


def test_a_paused_process_catches_up_and_a_dead_one_does_nothing_more() -> None:
    """That is what SIGSTOP and SIGKILL do. Nothing of a dead process may be left for the garbage collector."""
    timeline, log = Timeline(START), []
    loop = VirtualLoop(timeline)
    task = loop.start(ticks(log))
    timeline.run_until(START + 2.0)
    loop.pause()
    timeline.run_until(START + 10.0)
    assert log == [1.0, 2.0]
    loop.unpause()
    timeline.run_until(START + 11.0)
    assert log == [1.0, 2.0, 10.0, 11.0]
    loop.kill()
    assert task.cancelled()
    timeline.run_until(START + 20.0)
    assert log == [1.0, 2.0, 10.0, 11.0, -1.0]


def test_what_a_task_raises_ends_the_simulation() -> None:
    """A checker's finding must not be lost in a task whose result nothing waits for."""
    timeline = Timeline(START)

    async def fail() -> None:
        raise Violation("invariant", "detail")

    async def begin() -> None:
        await asyncio.gather(asyncio.create_task(fail()), return_exceptions=True)

    loop = VirtualLoop(timeline)
    loop.start(begin())
    with pytest.raises(Violation):
        timeline.run_until(START + 1.0)
    loop.kill()
