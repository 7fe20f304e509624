"""Threads whose owners take turns. The first piece waits for an event, so that the others queue behind it."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, wait

import pytest

from kvloom_common.limits.fair_threads import FairThreads

TIMEOUT_SECONDS = 10.0


def test_a_flood_of_one_owner_delays_another_by_one_piece() -> None:
    """In order of arrival the other one's piece would have been the last."""
    threads, go, order = FairThreads[str](1, "test"), threading.Event(), list[str]()
    begun = threads.submit("flood", lambda: go.wait(TIMEOUT_SECONDS))
    pieces = [threads.submit("flood", lambda number=i: order.append(f"flood {number}")) for i in range(20)]
    pieces += [threads.submit("calm", lambda: order.append("calm"))]
    assert threads.num_waiting("flood") >= 20
    go.set()
    wait([begun, *pieces], TIMEOUT_SECONDS)
    assert order.index("calm") <= 1
    assert [one for one in order if one != "calm"] == [f"flood {i}" for i in range(20)]
    threads.shutdown()


def test_long_pieces_of_one_owner_leave_a_thread_to_the_others() -> None:
    """A text without a place to cut it takes seconds."""
    threads, go = FairThreads[str](2, "test"), threading.Event()
    long = [threads.submit("flood", lambda: go.wait(TIMEOUT_SECONDS)) for _ in range(3)]
    assert threads.submit("calm", lambda: "done").result(TIMEOUT_SECONDS) == "done"
    assert not any(one.done() for one in long)
    go.set()
    wait(long, TIMEOUT_SECONDS)
    assert all(one.result() for one in long), "what was passed over is computed later"
    threads.shutdown()


def test_a_piece_that_fails_fails_alone() -> None:
    """Its error is its owner's."""
    threads = FairThreads[str](1, "test")
    failed = threads.submit("a", lambda: 1 // 0)
    assert threads.submit("a", lambda: 1).result(TIMEOUT_SECONDS) == 1
    with pytest.raises(ZeroDivisionError):
        failed.result(TIMEOUT_SECONDS)
    threads.shutdown()


def test_what_has_not_begun_is_cancelled_at_the_end() -> None:
    """Nothing waits for it for ever; and a piece that was cancelled before is not computed."""
    threads, go, computed = FairThreads[str](1, "test"), threading.Event(), list[int]()
    begun = threads.submit("a", lambda: go.wait(TIMEOUT_SECONDS))
    cancelled = threads.submit("a", lambda: computed.append(1))
    assert cancelled.cancel()
    left = threads.submit("a", lambda: computed.append(2))
    threads.shutdown()
    threads.shutdown()
    go.set()
    assert begun.result(TIMEOUT_SECONDS)
    with pytest.raises(CancelledError):
        left.result(TIMEOUT_SECONDS)
    with pytest.raises(RuntimeError):
        threads.submit("a", lambda: None)
    assert not computed
