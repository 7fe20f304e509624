"""Output commit: events are shown once the journal has them, or when that takes too long."""

from __future__ import annotations

import asyncio

from edge_http.resume.commit_gate import CommitGate


class Publication:
    def __init__(self) -> None:
        self.is_noted = False
        self.num_published = 0
        self.num_events = 0
        self.num_released = 0
        self.released = asyncio.Event()

    def release(self, up_to: int) -> None:
        self.num_released = max(self.num_released, up_to)
        self.released.set()


def send(gate: CommitGate[Publication], stream: Publication) -> None:
    stream.num_events += 1
    if not stream.is_noted:
        gate.note(stream)


async def test_what_is_written_is_released_and_no_more() -> None:
    """Events that arrive during a write wait for the next write."""
    gate: CommitGate[Publication] = CommitGate(5.0)
    stream = Publication()
    send(gate, stream)
    assert gate.take() == [stream]
    send(gate, stream)
    stream.num_published = 1
    gate.commit()
    assert (stream.num_released, gate.holds, gate.wake.is_set()) == (1, True, True)
    assert gate.take() == [stream]
    stream.num_published = 2
    gate.commit()
    assert stream.num_released == 2
    assert not gate.wake.is_set()
    gate.close()


async def test_slow_journal_holds_nothing_up_until_it_is_quick_again() -> None:
    """Availability has priority; later the promise holds again."""
    gate: CommitGate[Publication] = CommitGate(0.2)
    stream = Publication()
    send(gate, stream)
    gate.take()
    async with asyncio.timeout(5):
        await stream.released.wait()
    assert stream.num_released == 1
    assert not gate.holds
    stream.num_published = 1
    gate.commit()
    assert not gate.holds, "it was late"
    send(gate, stream)
    gate.take()
    stream.num_published = 2
    gate.commit()
    assert gate.holds


async def test_failed_write_is_tried_again_and_holds_nothing_up() -> None:
    """While Redis is unreachable the streams continue; they are written once it is back."""
    gate: CommitGate[Publication] = CommitGate(5.0)
    stream = Publication()
    send(gate, stream)
    gate.take()
    gate.fail()
    assert (stream.num_released, gate.holds) == (1, False)
    assert gate.take() == [stream]


async def test_process_that_stood_still_has_not_waited() -> None:
    """A timer that fires late proves nothing about Redis: whether another edge has taken over has to be checked
    first."""
    gate: CommitGate[Publication] = CommitGate(0.01)
    stream = Publication()
    send(gate, stream)
    gate.take()
    gate._timer_at -= 1.0
    gate._on_late()
    assert (stream.num_released, gate.holds) == (0, True)
    gate.close()


async def test_edge_that_stops_shows_nothing_more_that_is_not_written() -> None:
    """However slow Redis is: another edge continues from what is written, and no client may be ahead of that."""
    gate: CommitGate[Publication] = CommitGate(0.01)
    stream = Publication()
    send(gate, stream)
    gate.take()
    async with asyncio.timeout(5):
        await stream.released.wait()
    assert not gate.holds
    gate.hold()
    send(gate, stream)
    assert gate._timer is None, "nothing would wait for Redis"
    gate.take()
    assert (stream.num_released, gate.holds) == (1, True)
    stream.num_published = 2
    gate.commit()
    assert (stream.num_released, gate.holds) == (2, True)
    gate.fail()
    assert not gate.holds
