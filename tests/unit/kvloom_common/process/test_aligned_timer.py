"""The periodic work of one process runs at the same moment, and never twice in a row."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.process.aligned_timer import seconds_to_aligned_tick

TIMES = st.floats(0.0, 1e7)
PIDS = st.integers(1, 2**22)


@given(now=TIMES, pid=PIDS, period=st.sampled_from([0.5, 1.0, 2.0]))
def test_a_task_that_waits_from_tick_to_tick_wakes_up_once_a_period(now: float, pid: int, period: float):
    """Ticks stay regular if timers fire a little early, or the work takes long."""
    first = now + seconds_to_aligned_tick(now, period, pid)
    assert first > now
    for moment in (first - 0.001, first, first + 0.5 * period):
        following = moment + seconds_to_aligned_tick(moment, period, pid)
        assert abs(following - (first + period)) < 1e-6


@given(one=TIMES, other=TIMES, pid=PIDS)
def test_all_that_a_process_does_falls_together(one: float, other: float, pid: int):
    """The start does not matter. Work that is done every two seconds is done at one of the process's seconds."""
    ticks = [one + seconds_to_aligned_tick(one, 1.0, pid), other + seconds_to_aligned_tick(other, 2.0, pid)]
    apart = abs(ticks[0] - ticks[1]) % 1.0
    assert min(apart, 1.0 - apart) < 1e-6


def test_processes_do_not_crowd_together():
    """Processes that were started one after the other have neighbouring ids."""
    moments = sorted(seconds_to_aligned_tick(0.0, 1.0, pid) % 1.0 for pid in range(1000, 1008))
    assert all(later - earlier > 0.05 for earlier, later in itertools.pairwise(moments))
