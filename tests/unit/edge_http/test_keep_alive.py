"""When streams are kept alive, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from edge_http.wire.keep_alive import TURNS, KeepAlive
from lab.dst.timeline import Timeline
from lab.dst.virtual_loop import VirtualLoop

SECONDS = 10.0


class Stream:
    def __init__(self) -> None:
        self.num_events = 0
        self.is_over = False
        self.kept_alive_at: list[float] = []
        self.begun_at: list[float] = []

    def begin_early(self) -> None:
        self.begun_at.append(asyncio.get_running_loop().time())

    def keep_alive(self) -> None:
        self.kept_alive_at.append(asyncio.get_running_loop().time())


def in_virtual_time(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Within an hour of it."""
    timeline = Timeline(100.0)
    running = VirtualLoop(timeline).start(run())
    timeline.run_until(3700.0)
    assert running.done()


@pytest.mark.parametrize("event_at", [0.0, 0.1, 2.4, 2.6, 9.9])
def test_a_stream_is_silent_for_a_quarter_longer_at_most(event_at: float) -> None:
    """Proxies cut at a bound, so a stream needs one, wherever in the timer's turns its last event was."""
    stream = Stream()

    async def run() -> None:
        begun = asyncio.get_running_loop().time()
        kept = KeepAlive(SECONDS)
        kept.add(stream)
        await asyncio.sleep(event_at)
        stream.num_events += 1
        sent_at = begun + event_at
        await asyncio.sleep(5 * SECONDS)
        stream.is_over = True
        silences = [later - earlier for earlier, later in itertools.pairwise([sent_at, *stream.kept_alive_at])]
        assert len(silences) >= 4
        assert max(silences) <= SECONDS * (1 + 1 / TURNS) + 1e-6
        assert min(silences) >= SECONDS * (1 - 1 / TURNS) - 1e-6

    in_virtual_time(run)


def test_a_stream_whose_tokens_flow_gets_nothing() -> None:
    """Comments are for silence only."""
    stream = Stream()

    async def run() -> None:
        kept = KeepAlive(SECONDS)
        kept.add(stream)
        for _ in range(100):
            await asyncio.sleep(SECONDS / 2)
            stream.num_events += 1
        assert not stream.kept_alive_at
        kept.discard(stream)

    in_virtual_time(run)


@pytest.mark.parametrize("is_discarded", [True, False])
def test_the_timer_ends_with_the_last_stream(is_discarded: bool) -> None:
    """An idle edge wakes up for nothing, and holds no answer that is over."""
    stream = Stream()
    kept = KeepAlive(SECONDS)

    async def run() -> None:
        kept.add(stream)
        await asyncio.sleep(1)
        stream.is_over = True
        if is_discarded:
            kept.discard(stream)
        await asyncio.sleep(SECONDS)
        assert not kept.is_running

    in_virtual_time(run)


def test_zero_means_never() -> None:
    """An operator may switch it off."""
    stream = Stream()

    async def run() -> None:
        kept = KeepAlive(0)
        kept.add(stream)
        await asyncio.sleep(100)
        assert not stream.kept_alive_at
        assert not kept.is_running

    in_virtual_time(run)


@pytest.mark.parametrize("idle_seconds", [0, 0.1, 1.7, SECONDS])
@pytest.mark.parametrize("after", [0.0, 0.1, 0.24, 0.26, 0.49])
def test_a_stream_that_was_not_refused_begins_once(idle_seconds: float, after: float) -> None:
    """Wherever in the timer's turns it came: not before a refusal could come, and not much later."""
    first, second = Stream(), Stream()

    async def run() -> None:
        kept = KeepAlive(idle_seconds, 0.5)
        kept.add(first)
        await asyncio.sleep(after)
        begun = asyncio.get_running_loop().time()
        kept.add(second)
        await asyncio.sleep(5)
        assert [0.5 <= at - begun <= 1.0 + 1e-6 for at in second.begun_at] == [True]
        assert [0.5 <= at + after - begun <= 1.0 + 1e-6 for at in first.begun_at] == [True]
        for stream in (first, second):
            kept.discard(stream)
            assert bool(stream.kept_alive_at) == (0 < idle_seconds < 5)
        await asyncio.sleep(SECONDS)
        assert not kept.is_running

    in_virtual_time(run)


def test_a_stream_that_is_over_does_not_begin() -> None:
    """Its refusal has an HTTP status of its own."""
    stream = Stream()

    async def run() -> None:
        kept = KeepAlive(SECONDS, 0.5)
        kept.add(stream)
        stream.is_over = True
        await asyncio.sleep(2 * SECONDS)
        assert not stream.begun_at
        assert not kept.is_running

    in_virtual_time(run)
