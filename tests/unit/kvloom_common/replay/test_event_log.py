"""The event log: its numbers, its bounds, and what can be read back."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom_common.replay.event_log import EVENT_OVERHEAD_BYTES, LOG_OVERHEAD_BYTES, EventLog, ReplayBudget
from tests.examples import num_examples

OPERATIONS = st.lists(
    st.one_of(
        st.binary(max_size=400).map(lambda event: ("append", event)),
        st.tuples(st.just("read"), st.integers(0, 60), st.integers(1, 900)),
        st.just(("forget",)),
    ),
    max_size=200,
)


@settings(max_examples=num_examples(60), deadline=None)
@given(OPERATIONS, st.integers(0, 2500))
def test_log_is_a_bounded_window_of_all_events(operations: list[tuple], room_bytes: int) -> None:
    """Compared with the plainest model: the latest events, whole and in order, that fit the bound."""
    budget = ReplayBudget(1 << 30, lambda: None)
    log = EventLog(LOG_OVERHEAD_BYTES + room_bytes, budget)
    everything: list[bytes] = []
    kept: deque[int] = deque()
    for operation, *arguments in operations:
        if operation == "append":
            everything.append(arguments[0])
            log.append(arguments[0])
            kept.append(len(everything))
            while sum(len(everything[number - 1]) + EVENT_OVERHEAD_BYTES for number in kept) > room_bytes:
                kept.popleft()
        elif operation == "forget":
            log.forget()
            kept.clear()
        else:
            after, max_bytes = arguments
            first = kept[0] if kept else len(everything) + 1
            assert log.holds(after) == (after + 1 >= first)
            if log.holds(after) and after <= len(everything):
                events = list(log.read(after, max_bytes))
                assert events == everything[after : after + len(events)]
                assert events or after == len(everything)
                assert sum(map(len, events[:-1])) < max_bytes
        assert log.num_events == len(everything)
        assert log.first_number == (kept[0] if kept else len(everything) + 1)
        held = sum(len(everything[number - 1]) + EVENT_OVERHEAD_BYTES for number in kept)
        assert log.num_bytes == budget.num_bytes == LOG_OVERHEAD_BYTES + held
    log.close()
    assert budget.num_bytes == 0


def test_log_that_runs_over_for_long_stays_small() -> None:
    """Forgotten events must not keep their places in the list."""
    log = EventLog(LOG_OVERHEAD_BYTES + 100 * (10 + EVENT_OVERHEAD_BYTES), ReplayBudget(1 << 30, lambda: None))
    for number in range(100_000):
        log.append(b"%010d" % number)
    assert list(log.read(99_900, 1 << 20)) == [b"%010d" % number for number in range(99_900, 100_000)]
    assert len(log._events) < 5_000


def test_budget_asks_for_room_when_it_is_exceeded() -> None:
    """The append that exceeds the bound is the one that makes room: memory never exceeds it by more than an event."""
    logs: list[EventLog] = []
    budget = ReplayBudget(3 * LOG_OVERHEAD_BYTES, lambda: logs[0].forget())
    logs += [EventLog(1 << 20, budget), EventLog(1 << 20, budget)]
    for _ in range(1000):
        logs[0].append(b"x" * 100)
        assert budget.num_bytes <= budget.max_bytes
    assert logs[0].num_events == 1000
