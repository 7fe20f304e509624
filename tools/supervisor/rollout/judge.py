"""Judges if a new version of a model serves worse than the old one, as far as is known. It is pure.

Both have served a share of the same traffic. The new version is taken back when one of these is certain enough:

- its error rate is above that of the old one by more than `max_error_rate_increase`;
- its median time to first token, or the 90th percentile, is longer than `max_ttft_ratio` times that of the old one;
- the likelihood gap per token is above `max_likelihood_gap`.

"Certain enough": a version that is within all of the limits is taken back in at most ALPHA of the steps, however often
one looks. That holds for any traffic whose requests are independent, and for any number of them, because only
distribution-free bounds are used:

- A rate k/n is bounded by those p for which n * KL(k/n, p) <= log(1/alpha), with the Kullback-Leibler divergence of two
  coins: Chernoff's bound (H. Chernoff, A Measure of Asymptotic Efficiency, Ann. Math. Stat. 23, 1952; in this form A.
  Garivier and O. Cappe, The KL-UCB Algorithm, COLT 2011).
- A quantile is above a bound of the histogram if the rate of values up to that bound is certainly below the quantile's
  rank (the order-statistics interval: G. Hahn and W. Meeker, Statistical Intervals, 1991, section 5.2). Histograms
  know a quantile only to a bucket, so a slowdown is certain when it exceeds the limit by about a bucket.
- Each look spends its part of ALPHA, 6 / (pi * number of the look)^2 of it, whose sum is 1 (a union bound over all
  looks; alpha spending: K. Lan and D. DeMets, Discrete Sequential Boundaries for Clinical Trials, Biometrika 70, 1983).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvloom_common.models.likelihood_gap import GapSums, lower_bound_at_any_time

ALPHA: Final = 0.01
QUANTILES: Final = (0.5, 0.9)
_NUM_BOUNDS: Final = 2 + 2 * len(QUANTILES)
"""A test compares two bounds: a lower one of the new version, and an upper one of the old one."""
_GROWTH_PER_LOOK: Final = 1.5
_BISECTIONS: Final = 50


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Says what is still acceptable."""

    max_error_rate_increase: float = 0.02
    """From 0 to 1: 0.02 are two more errors in a hundred requests."""
    max_ttft_ratio: float = 2.0
    max_likelihood_gap: float | None = None
    """In nats per token. None: it is not measured."""
    min_requests: int = 20
    """How many requests of the new version a step needs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Counts what a version has served. Requests that failed by the caller's fault, or were cancelled, do not count."""

    num_requests: int = 0
    num_errors: int = 0
    ttft_bounds: tuple[float, ...] = ()
    """The upper bounds of the buckets, in seconds, ascending; the last one is infinite."""
    ttft_counts: tuple[int, ...] = ()
    """The number of values in each bucket."""

    @property
    def error_rate(self) -> float:
        return self.num_errors / self.num_requests if self.num_requests else 0.0

    def ttft_quantile(self, rank: float) -> float | None:
        """An estimate for people, linear within a bucket, as Prometheus' histogram_quantile gives it."""
        wanted, passed, low = rank * sum(self.ttft_counts), 0, 0.0
        for bound, count in zip(self.ttft_bounds, self.ttft_counts, strict=True):
            if count and passed + count >= wanted:
                return low if math.isinf(bound) else low + (bound - low) * (wanted - passed) / count
            passed, low = passed + count, bound
        return None


class Decision(enum.Enum):
    CONTINUE = "continue"
    WAIT = "wait"
    """The new version has not had enough requests."""
    ROLL_BACK = "roll back"


class RolloutVerdict(NamedTuple):
    decision: Decision
    reason: str = ""


def judge(old: Counts, new: Counts, limits: RolloutLimits, look: int, gap: GapSums | None = None) -> RolloutVerdict:
    """`look`: the how-manieth of this step this is, from 1. `gap`: how likely the new version finds the answers of the
    old one. Without requests of the old version its errors are none,
    and times are not compared."""
    alpha = ALPHA * 6 / (math.pi * look) ** 2 / _NUM_BOUNDS
    reason = (
        _too_many_errors(old, new, limits, alpha) or _too_slow(old, new, limits, alpha) or too_unlikely(gap, limits)
    )
    if reason:
        return RolloutVerdict(Decision.ROLL_BACK, reason)
    if new.num_requests < limits.min_requests:
        return RolloutVerdict(Decision.WAIT, f"{new.num_requests} of at least {limits.min_requests} requests")
    return RolloutVerdict(Decision.CONTINUE)


def _too_many_errors(old: Counts, new: Counts, limits: RolloutLimits, alpha: float) -> str:
    at_least = rate_at_least(new.num_errors, new.num_requests, alpha)
    at_most = rate_at_most(old.num_errors, old.num_requests, alpha) if old.num_requests else 0.0
    if at_least <= at_most + limits.max_error_rate_increase:
        return ""
    return (
        f"its error rate is {new.error_rate:.1%} ({new.num_errors} of {new.num_requests}), certainly at least "
        f"{at_least:.1%}; that of the old version is {old.error_rate:.1%}, certainly at most {at_most:.1%}"
    )


def _too_slow(old: Counts, new: Counts, limits: RolloutLimits, alpha: float) -> str:
    for rank in QUANTILES:
        at_least = quantile_at_least(new, rank, alpha)
        at_most = quantile_at_most(old, rank, alpha)
        if at_least > limits.max_ttft_ratio * at_most:
            name = "median time" if rank == QUANTILES[0] else f"{rank:.0%} quantile of the time"
            return (
                f"its {name} to first token is certainly above {at_least:g} s; that of the old version is certainly at "
                f"most {at_most:g} s"
            )
    return ""


def too_unlikely(gap: GapSums | None, limits: RolloutLimits) -> str:
    """Why the new version is taken back; "" if it is not certain enough. It may be asked at any time, since the bound
    holds then."""
    if gap is None or limits.max_likelihood_gap is None:
        return ""
    low = lower_bound_at_any_time(gap, ALPHA)
    if low <= limits.max_likelihood_gap:
        return ""
    return (
        f"it finds the answers of the old version less likely by {gap.gap_per_token:.3g} nats per token, certainly by "
        f"more than {low:.3g} ({gap.num_answers:g} answers); at most {limits.max_likelihood_gap:g} are allowed"
    )


class Looks:
    """When to look during a step, so that looking costs little certainty: whenever the requests have grown by half."""

    def __init__(self) -> None:
        self.count = 0
        self._last = 0

    def take(self, num_requests: int, *, is_end: bool) -> bool:
        """Returns True when to look now that the new version has so many requests; the look is counted. At the end of
        the step, every further request is a reason."""
        if self.count:
            is_due = num_requests > self._last and (is_end or num_requests >= self._last * _GROWTH_PER_LOOK)
        else:
            is_due = is_end or num_requests > 0
        if is_due:
            self.count += 1
            self._last = num_requests
        return is_due


def rate_at_least(count: int, total: int, alpha: float) -> float:
    """A lower bound of a rate of which `count` of `total` is a sample, wrong in at most `alpha` of all samples."""
    return 1 - rate_at_most(total - count, total, alpha)


def rate_at_most(count: int, total: int, alpha: float) -> float:
    """Returns an upper bound of the rate, as `rate_at_least` returns a lower one."""
    if not total:
        return 1.0
    share, allowed = count / total, math.log(1 / alpha) / total
    low, high = share, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _divergence(share, middle) > allowed:
            high = middle
        else:
            low = middle
    return high


def _divergence(share: float, rate: float) -> float:
    """The Kullback-Leibler divergence of two coins, in nats."""
    parts = ((share, rate), (1 - share, 1 - rate))
    return sum(p * (math.log(p / q) if q else math.inf) for p, q in parts if p)


def quantile_at_least(counts: Counts, rank: float, alpha: float) -> float:
    """The largest bucket's bound above which the quantile certainly is; 0 if there is none."""
    total, found = sum(counts.ttft_counts), 0.0
    for bound, passed in zip(counts.ttft_bounds, _cumulative(counts.ttft_counts), strict=True):
        if rate_at_most(passed, total, alpha) >= rank:
            return found
        found = bound
    return found


def quantile_at_most(counts: Counts, rank: float, alpha: float) -> float:
    """The smallest bucket's bound that the quantile certainly does not exceed; infinite if there is none."""
    total = sum(counts.ttft_counts)
    for bound, passed in zip(counts.ttft_bounds, _cumulative(counts.ttft_counts), strict=True):
        if rate_at_least(passed, total, alpha) >= rank:
            return bound
    return math.inf


def _cumulative(counts: Sequence[int]) -> list[int]:
    return [sum(counts[: number + 1]) for number in range(len(counts))]
