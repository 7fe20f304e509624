"""The settings of rules: the keys of the configuration, and beside them what no operator can sensibly choose.

A rule takes one of these. What they add to the keys has the values that were measured, or that follow from others;
tests and simulations, whose steps are shorter, choose their own.
"""

from __future__ import annotations

from typing import Final

from kvloom_common.config import (
    BrownoutConfig,
    DisaggregationConfig,
    FairnessConfig,
    HealthConfig,
    OverloadConfig,
)

NO_RAMP: Final = 2**31
"""A shard that joins gets as many requests as it takes."""
SLOW_WINDOWS: Final = 6.0
"""The slow window of a brownout ladder, in fast windows."""


class HealthSettings(HealthConfig):
    slow_factor: float = 10.0
    """A shard is suspected if its tokens are this many times slower than the median of the model's shards."""
    slow_seconds: float = 10.0
    """How long a shard must have been decoding before its speed is judged: some hundred steps."""
    max_failures: int = 5
    """A shard is suspected if its engine has failed this many requests in a row, which no bad request does alone."""
    max_suspected_share: float = 0.5
    """The largest share of a model's shards that may be suspected at a time: what befalls most of them has a cause that
    other shards do not escape."""
    probe_seconds: float = 1.0
    """The time before the first probe of a suspected shard. Each missed probe doubles it."""
    max_probe_seconds: float = 30.0
    num_probes: int = 3
    """How many probes in a row must be answered in time before the shard is healthy again."""


class OverloadSettings(OverloadConfig):
    sheds_load_early: bool = True
    """True rejects requests on arrival that would wait longer than they may, judged by the rate at which the queue
    drains, and drops queued requests that cannot be answered before their deadline. Otherwise only
    `max_queued_requests` and the clock decide."""
    ramp_start_requests: int = 8
    """How many requests a shard that joins (or returns) while requests are queued gets at first. It gets two more with
    every first token that it produces, so that it is not overwhelmed."""


class DisaggregationSettings(DisaggregationConfig):
    leg_timeout_seconds: float = 30.0
    """A prompt that another shard has not computed within this time is computed elsewhere."""


class FairnessSettings(FairnessConfig):
    preempt_after_seconds: float = 0.25
    """How long a request of a tenant below its share waits before it gets the place of a running answer."""
    competing_prefill_seconds: float = 0.05
    """The most unfinished prefill of a shard, in seconds, to which this router adds for a tenant above its share while
    several tenants use the shard, so that another tenant's request hardly waits for it; 0: any."""
    reserved_share: float = 0.125
    """The part of each shard's batch and of its KV blocks, at least one of each, that tenants above their share leave
    free while tenants compete. Preemption makes room for what needs more."""
    contention_seconds: float = 30.0
    """How long tenants, or classes, are taken to compete after one had to wait: longer than a usual answer takes."""


class BrownoutSettings(BrownoutConfig):
    fast_window_seconds: float = 0.0
    """0: as long as a model is on a step, at least, so that the window shows what the step has done."""
    slow_window_seconds: float = 0.0
    """0: `SLOW_WINDOWS` fast ones."""
    step_up_burn_rate: float = 4.0
    """A model goes one step up when both windows use up the error budget this many times as fast as `target` allows."""
    step_down_burn_rate: float = 1.0
    """It goes one step down when the fast window has stayed below this rate for `hold_seconds`."""
    min_requests: int = 10
    """With fewer interactive requests of a model in the slow window, it does not go up."""

    def __post_init__(self) -> None:
        self.fast_window_seconds = self.fast_window_seconds or self.min_step_seconds
        self.slow_window_seconds = self.slow_window_seconds or SLOW_WINDOWS * self.fast_window_seconds
