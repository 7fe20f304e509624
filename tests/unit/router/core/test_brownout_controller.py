"""Which step of the brownout ladder a model is on follows from its burn rates and time alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.config import BrownoutStepConfig
from router.core.brownout.controller import MAX_HOLD_FACTOR, MAX_MODELS, BrownoutController, BurnRateWindows, StepChange
from router.core.rule_settings import BrownoutSettings

CONFIG = BrownoutSettings(steps=[BrownoutStepConfig(max_tokens=n) for n in (400, 300, 200, 100)])


def drive(
    controller: BrownoutController, bad_share: Callable[[float], float], seconds: float, *, start: float = 0.0
) -> list[tuple[float, StepChange]]:
    """Ten requests a second of one model, of which `bad_share(time)` are bad, evenly spread; and the ticks."""
    changes: list[tuple[float, StepChange]] = []
    owed = 0.0
    for number in range(int(10 * seconds)):
        now = start + number / 10
        if now >= controller.next_deadline():
            changes += [(now, change) for change in controller.pass_time(now)]
        owed += bad_share(now)
        is_bad = owed >= 1.0
        owed -= is_bad
        change = controller.observe("m", now, is_good=not is_bad)
        changes += [(now, change)] if change is not None else []
    return changes


def test_a_lasting_overload_climbs_one_step_at_a_time_to_the_last() -> None:
    """Every step gets its time to work before the next one."""
    changes = drive(BrownoutController(CONFIG), lambda _: 1.0, 120.0)
    assert [change.step for _, change in changes] == [1, 2, 3, 4]
    times = [at for at, _ in changes]
    assert all(later - at >= CONFIG.min_step_seconds for at, later in itertools.pairwise(times))
    assert times[0] <= 2.0


def test_after_the_load_it_comes_down_one_step_per_hold_time_to_none() -> None:
    """It comes down while requests are served well, and without any requests too."""
    for seconds_of_requests in (400.0, 0.0):
        controller = BrownoutController(CONFIG)
        drive(controller, lambda _: 1.0, 60.0)
        changes = drive(controller, lambda _: 0.0, seconds_of_requests, start=60.0)
        now = 60.0 + seconds_of_requests
        while controller.next_deadline() < 1000.0:
            now = max(now, controller.next_deadline())
            changes += [(now, change) for change in controller.pass_time(now)]
        assert [change.step for _, change in changes] == [3, 2, 1, 0]
        times = [60.0, *(at for at, _ in changes)]
        assert all(later - at >= CONFIG.hold_seconds for at, later in itertools.pairwise(times))


def test_a_burst_that_the_slow_window_hardly_sees_changes_nothing() -> None:
    """A few seconds of bad luck in a minute of traffic are no overload: both windows must burn."""
    controller = BrownoutController(CONFIG)
    assert drive(controller, lambda at: 1.0 if 60.0 <= at < 63.0 else 0.0, 120.0) == []


def test_few_requests_are_no_overload() -> None:
    """One slow request of two says nothing about a model."""
    controller = BrownoutController(CONFIG)
    for number in range(CONFIG.min_requests - 1):
        assert controller.observe("m", number * 1.5, is_good=False) is None
    assert controller.step("m") == 0


@pytest.mark.parametrize("bad_share", [0.04, 0.05, 0.06, 0.19, 0.2, 0.21])
def test_it_does_not_flap_at_a_threshold(bad_share: float) -> None:
    """With noise around either threshold for ten minutes, a model that is degraded changes at most a few times: between
    the thresholds nothing happens, so it either climbs to the end or comes down to none, with few turns."""
    for seed in range(5):
        rng = random.Random(f"{seed} {bad_share}")
        controller = BrownoutController(CONFIG)
        drive(controller, lambda _: 1.0, 15.0)
        changes = drive(controller, lambda _, rng=rng: float(rng.random() < bad_share), 600.0, start=15.0)
        assert len(changes) <= 8, [(round(at), change.step) for at, change in changes]


def test_a_load_that_returns_with_every_step_down_makes_the_hold_time_longer() -> None:
    """If the ladder is what keeps the objective, coming down brings the overload back. Each time it does, the model
    stays longer: in an hour it changes far less often than once in a hold time."""
    controller = BrownoutController(CONFIG)
    changes = drive(controller, lambda _: 0.0 if controller.step("m") >= 2 else 1.0, 3600.0)
    turns = [at for at, change in changes if change.step < change.previous_step]
    assert turns[2] - turns[1] > 1.5 * (turns[1] - turns[0])
    assert len(changes) <= 3600.0 / (CONFIG.hold_seconds * MAX_HOLD_FACTOR) * 2 + 12


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=300), st.integers(0, 300))
def test_more_bad_requests_never_give_a_lower_first_step(traffic: list[tuple[float, bool]], flipped: int) -> None:
    """The response is monotone: until the first step down, a run in which one more request is bad is never on a lower
    step than the one without; every change is by one step, and none comes before its time."""
    steps: list[list[int]] = []
    for worse in (False, True):
        controller, now, seen = BrownoutController(CONFIG), 0.0, [0]
        last_change = -1e9
        for number, (gap, is_good) in enumerate(traffic):
            now += gap
            change = controller.observe("m", now, is_good=is_good and not (worse and number == flipped))
            if change is not None:
                assert abs(change.step - change.previous_step) == 1
                assert 0 <= change.step <= len(CONFIG.steps)
                assert now - last_change >= min(CONFIG.min_step_seconds, CONFIG.hold_seconds)
                last_change = now
            seen.append(controller.step("m"))
        steps.append(seen)
    first_up = [next((i for i, step in enumerate(seen) if step), len(seen)) for seen in steps]
    assert first_up[1] <= first_up[0]


@given(
    st.lists(st.tuples(st.floats(0, 40), st.booleans()), min_size=1, max_size=200),
    st.floats(0.5, 20),
    st.floats(1.1, 36),
)
def test_the_windows_count_what_a_list_would(traffic: list[tuple[float, bool]], fast: float, ratio: float) -> None:
    """The ring forgets exactly the buckets that have left the slow window, also after long silences."""
    windows = BurnRateWindows(0.9, fast, fast * ratio)
    size = len(windows._num_all)
    now, seen = 0.0, []
    for gap, is_good in traffic:
        now += gap
        windows.add(now, is_good=is_good)
        seen.append((int(now // windows.bucket_seconds), is_good))
        newest = seen[-1][0]
        slow = [good for bucket, good in seen if bucket > newest - size]
        recent = [good for bucket, good in seen if bucket > newest - 10]
        rates = windows.rates(now)
        assert rates.num_requests == len(slow)
        assert rates.slow == pytest.approx(slow.count(False) / len(slow) / 0.1)
        assert rates.fast == pytest.approx(recent.count(False) / len(recent) / 0.1)


def test_its_memory_is_bounded() -> None:
    """Clients cannot make a router remember any number of models; those that are degraded are kept."""
    controller = BrownoutController(CONFIG)
    drive(controller, lambda _: 1.0, 5.0)
    for number in range(2 * MAX_MODELS):
        controller.observe(f"other-{number}", 5.0, is_good=True)
    assert len(controller._models) == MAX_MODELS
    assert controller.step("m") == 1
