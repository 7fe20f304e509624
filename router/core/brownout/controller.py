"""Decides which step of the brownout ladder each model is on, by a pure function of observations and time.

A step up needs a high burn rate in both windows and a minimum time on the present step; a step down needs a low rate in
the fast window for a hold time. The rates between the two change nothing (hysteresis). When a model has to go up again
soon after it went down, the hold time doubles, so that a lasting overload does not make it swing.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from router.core.rule_settings import BrownoutSettings

BUCKETS_PER_FAST_WINDOW: Final = 10


class BurnRates(NamedTuple):
    fast: float
    slow: float
    num_requests: int
    """In the slow window."""


class BurnRateWindows:
    """Counts good and bad requests in a ring of buckets, whose size does not depend on the traffic."""

    __slots__ = ("_budget", "_newest", "_num_all", "_num_bad", "bucket_seconds")

    def __init__(self, target: float, fast_window_seconds: float, slow_window_seconds: float) -> None:
        """`target` is the share of requests that must be good, below 1."""
        self._budget = 1.0 - target
        self.bucket_seconds = fast_window_seconds / BUCKETS_PER_FAST_WINDOW
        num_buckets = max(BUCKETS_PER_FAST_WINDOW, math.ceil(slow_window_seconds / self.bucket_seconds))
        self._num_all = [0] * num_buckets
        self._num_bad = [0] * num_buckets
        self._newest = 0
        """The number of the newest bucket, counted from time 0."""

    def add(self, now: float, *, is_good: bool) -> None:
        """`now` is in seconds, and never goes backwards."""
        self._advance(now)
        index = self._newest % len(self._num_all)
        self._num_all[index] += 1
        self._num_bad[index] += not is_good

    def rates(self, now: float) -> BurnRates:
        """A window without requests burns nothing."""
        self._advance(now)
        size = len(self._num_all)
        fast = [(self._newest - age) % size for age in range(BUCKETS_PER_FAST_WINDOW)]
        num_fast, num_fast_bad = sum(self._num_all[i] for i in fast), sum(self._num_bad[i] for i in fast)
        num_slow, num_slow_bad = sum(self._num_all), sum(self._num_bad)
        return BurnRates(self._rate(num_fast_bad, num_fast), self._rate(num_slow_bad, num_slow), num_slow)

    def _rate(self, num_bad: int, num_all: int) -> float:
        return num_bad / num_all / self._budget if num_all else 0.0

    def _advance(self, now: float) -> None:
        """Empty the buckets of the time that has passed."""
        newest, size = int(now // self.bucket_seconds), len(self._num_all)
        for number in range(max(self._newest + 1, newest - size + 1), newest + 1):
            self._num_all[number % size] = self._num_bad[number % size] = 0
        self._newest = max(self._newest, newest)


MAX_MODELS: Final = 64
MAX_HOLD_FACTOR: Final = 8
SOON_HOLDS: Final = 2
"""A model that goes up within this many hold times after it went down went down too early."""


class StepChange(NamedTuple):
    model: str
    step: int
    previous_step: int
    rates: BurnRates


class _Model:
    __slots__ = ("calm_since", "evaluate_at", "hold_factor", "since", "step", "went_down_at", "windows")

    def __init__(self, config: BrownoutSettings, now: float) -> None:
        self.windows = BurnRateWindows(config.target, config.fast_window_seconds, config.slow_window_seconds)
        self.step = 0
        self.since = -math.inf
        """When it came to its step."""
        self.calm_since: float | None = None
        """Since when the burn rate is low; None: it is not."""
        self.went_down_at: float | None = None
        """When it last went down, if it has not gone up since."""
        self.hold_factor = 1
        self.evaluate_at = now


class BrownoutController:
    """Judges a model at most once per bucket of its windows, whatever the number of its requests. `now` is in seconds
    and never goes backwards."""

    def __init__(self, config: BrownoutSettings) -> None:
        self._config = config
        self._max_step = len(config.steps)
        self._models: dict[str, _Model] = {}

    def step(self, model: str) -> int:
        """0: nothing is degraded."""
        found = self._models.get(model)
        return 0 if found is None else found.step

    def observe(self, model: str, now: float, *, is_good: bool) -> StepChange | None:
        """An interactive request has met the objective, or missed it."""
        found = self._models.get(model) or self._add(model, now)
        if found is None:
            return None
        found.windows.add(now, is_good=is_good)
        return self._judge(model, found, now) if now >= found.evaluate_at else None

    def pass_time(self, now: float) -> list[StepChange]:
        """To be called at `next_deadline`: models go down without any requests, too."""
        due = [(name, model) for name, model in self._models.items() if model.step and now >= model.evaluate_at]
        changes = [self._judge(name, model, now) for name, model in due]
        return [change for change in changes if change is not None]

    def next_deadline(self) -> float:
        """When `pass_time` is next needed; infinite while no model is degraded."""
        return min((model.evaluate_at for model in self._models.values() if model.step), default=math.inf)

    def _add(self, name: str, now: float) -> _Model | None:
        """When there are many models, one that is not degraded is forgotten; None: all of them are."""
        if len(self._models) >= MAX_MODELS:
            forgotten = next((known for known, model in self._models.items() if not model.step), None)
            if forgotten is None:
                return None
            del self._models[forgotten]
        model = self._models[name] = _Model(self._config, now)
        return model

    def _judge(self, name: str, model: _Model, now: float) -> StepChange | None:
        config = self._config
        model.evaluate_at = now + model.windows.bucket_seconds
        rates = model.windows.rates(now)
        if rates.fast >= config.step_down_burn_rate:
            model.calm_since = None
        elif model.calm_since is None:
            model.calm_since = now
        previous = model.step
        if self._must_go_up(model, rates, now):
            self._note_up(model, now)
            model.step += 1
        elif model.step and model.calm_since is not None and self._has_held(model, model.calm_since, now):
            model.step -= 1
            model.went_down_at = model.calm_since = now  # each step down has a hold time of its own
        else:
            return None
        model.since = now
        return StepChange(name, model.step, previous, rates)

    def _must_go_up(self, model: _Model, rates: BurnRates, now: float) -> bool:
        config = self._config
        return (
            model.step < self._max_step
            and rates.num_requests >= config.min_requests
            and min(rates.fast, rates.slow) >= config.step_up_burn_rate
            and now - model.since >= config.min_step_seconds
        )

    def _has_held(self, model: _Model, calm_since: float, now: float) -> bool:
        return now - max(calm_since, model.since) >= self._config.hold_seconds * model.hold_factor

    def _note_up(self, model: _Model, now: float) -> None:
        if model.went_down_at is not None:
            is_soon = now - model.went_down_at <= SOON_HOLDS * self._config.hold_seconds
            model.hold_factor = min(2 * model.hold_factor, MAX_HOLD_FACTOR) if is_soon else 1
        elif not model.step:
            model.hold_factor = 1
        model.went_down_at = None
        model.calm_since = None
