"""The reader slot: one reader at a time, and a grace period without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.replay.event_log import LOG_OVERHEAD_BYTES, EventLog, ReplayBudget
from kvloom_common.replay.reader_slot import Nouns, ReaderSlot
from lab.dst.timeline import Timeline
from lab.dst.virtual_loop import VirtualLoop

NOUNS = Nouns("event", "response", "connection")


class Reader:
    def __init__(self, position: int) -> None:
        self.position = position
        self.error: KvloomError | None = None

    def break_off(self, error: KvloomError) -> None:
        self.error = error


class World:
    """A slot whose log keeps about the last ten events of one byte."""

    def __init__(self, num_events: int, grace_seconds: float = 60.0) -> None:
        self.log = EventLog(LOG_OVERHEAD_BYTES + 10 * 49, ReplayBudget(1 << 30, lambda: None))
        self.abandoned = asyncio.Event()
        self.slot: ReaderSlot[Reader] = ReaderSlot(self.log, grace_seconds, self.abandoned.set, NOUNS)
        for _ in range(num_events):
            self.log.append(b"x")


async def test_a_second_reader_takes_over() -> None:
    """The first one gets the reason for its end; its late detach does not affect its successor."""
    world = World(5)
    first, second = Reader(3), Reader(0)
    world.slot.attach(first)
    world.slot.attach(second)
    assert first.error is not None
    assert first.error.reason == ErrorReason.ERROR_REASON_STREAM_TAKEN_OVER
    assert not world.slot.detach(first, is_resumable=True)
    assert world.slot.reader is second
    assert world.slot.num_sent == 3
    assert world.slot.detach(second, is_resumable=True)
    world.slot.close()


@pytest.mark.parametrize(
    ("position", "reason"),
    [(21, ErrorReason.ERROR_REASON_INVALID_ARGUMENT), (3, ErrorReason.ERROR_REASON_EVENTS_GONE)],
)
async def test_a_position_that_cannot_be_served_changes_nothing(position: int, reason: ErrorReason) -> None:
    """It lies ahead of the last event, or events behind it are forgotten: the attached reader stays."""
    world = World(20)
    attached = Reader(20)
    world.slot.attach(attached)
    with pytest.raises(KvloomError) as refused:
        world.slot.attach(Reader(position))
    assert refused.value.reason == reason
    assert world.slot.reader is attached
    assert attached.error is None


def in_virtual_time(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Within ten minutes of it."""
    timeline = Timeline(100.0)
    running = VirtualLoop(timeline).start(run())
    timeline.run_until(700.0)
    assert running.done()


def test_the_grace_period_ends_an_answer_without_a_reader() -> None:
    """It runs from the moment a reader is gone, and a new reader stops it."""

    async def run() -> None:
        world = World(5, grace_seconds=30.0)
        for _ in range(2):
            reader = Reader(5)
            world.slot.attach(reader)
            await asyncio.sleep(31.0)  # the time with a reader must not count
            assert not world.abandoned.is_set()
            world.slot.detach(reader, is_resumable=True)
            await asyncio.sleep(29.0)
            assert not world.abandoned.is_set()
        async with asyncio.timeout(1.5):
            await world.abandoned.wait()

    in_virtual_time(run)


async def test_an_answer_that_no_client_can_resume_is_abandoned_in_the_next_turn() -> None:
    """The caller may be in the middle of an event, so it does not happen at once."""
    world = World(5)
    reader = Reader(5)
    world.slot.attach(reader)
    world.slot.break_off(world.slot.events_gone(0), is_resumable=False)
    assert reader.error is not None
    assert not world.abandoned.is_set()
    async with asyncio.timeout(5):
        await world.abandoned.wait()


def test_a_closed_slot_abandons_nothing() -> None:
    """Its owner is gone."""

    async def run() -> None:
        world = World(5, grace_seconds=0.0)
        world.slot.await_reader()
        assert world.slot.close() is None
        world.slot.abandon_soon()
        await asyncio.sleep(60.0)
        assert not world.abandoned.is_set()

    in_virtual_time(run)
