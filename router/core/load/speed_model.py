"""The prefill speed of one shard, learned from when first tokens came.

    seconds = c0 + c1·x + c2·x·(position + x/2) + c3·context

x = tokens computed after `position` cached ones (the second product is attention), context = tokens that decode in the
same steps. Least squares over the recent past, with a weak prior and no negative coefficient: a shard that slows down
is noticed, and shards of different speed are distinguished without configuration. The normal equations are kept with
exponential forgetting and solved by projected coordinate descent from the last solution (for the problem: Lawson and
Hanson, Solving Least Squares Problems, ch. 23); unlike the recursive form this cannot become unstable. Every
observation is weighted by the inverse of its duration, so that relative errors count alike for all prompts.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

DEFAULT_PREFILL_TOKENS_PER_SECOND: Final = 10_000.0
FORGETTING: Final = 0.98
"""Weight of the past per observation: about the last 50 count."""
PRIOR_WEIGHT: Final = 0.05
"""Weight of the prior, in observations: enough to fix what the shard's work does not determine."""
NUM_SWEEPS: Final = 3
"""Sweeps of coordinate descent per observation."""
MIN_SECONDS: Final = 1e-3
MAX_SURPRISE: Final = 5.0
"""An observation counts as at most this many times its prediction, and at least this fraction of it: one stall must not
change much."""

_SECONDS_PER_TOKEN: Final = 1.0 / DEFAULT_PREFILL_TOKENS_PER_SECOND
_SCALE: Final = (
    100 * _SECONDS_PER_TOKEN,
    _SECONDS_PER_TOKEN,
    1e-5 * _SECONDS_PER_TOKEN,
    2e-4 * _SECONDS_PER_TOKEN,
)
"""The coefficients before anything is known."""
_ONES: Final = (1.0, 1.0, 1.0, 1.0)
_LOWEST: Final = (0.0, 0.01, 0.0, 0.0)
"""The lowest coefficient, relative to its prior: a token is never free."""


class PrefillWork(msgspec.Struct, frozen=True):
    """The work of prefill, for one request or summed over several. Adding is exact, since the model is linear."""

    num_requests: int = 0
    num_tokens: int = 0
    num_pairs: float = 0.0
    """Attention: tokens x positions that they attend to."""

    @staticmethod
    def of(num_tokens: int, num_cached_tokens: int) -> PrefillWork:
        return PrefillWork(1, num_tokens, num_tokens * (num_cached_tokens + num_tokens / 2))

    def __add__(self, other: PrefillWork) -> PrefillWork:
        return PrefillWork(
            self.num_requests + other.num_requests,
            self.num_tokens + other.num_tokens,
            self.num_pairs + other.num_pairs,
        )

    def __sub__(self, other: PrefillWork) -> PrefillWork:
        return PrefillWork(
            self.num_requests - other.num_requests,
            self.num_tokens - other.num_tokens,
            self.num_pairs - other.num_pairs,
        )


class SpeedModel:
    """The coefficients of one shard, or of a whole fleet, which its shards have as their prior: so a new shard is
    assumed to be like its peers, and gets work that shows how it differs."""

    __slots__ = ("_known", "_moments", "_prior", "_products", "num_observations", "theta")

    def __init__(self, prior: SpeedModel | None = None) -> None:
        self.num_observations = 0
        self._prior = prior
        self._products = (0.0,) * 10
        """The symmetric matrix's upper half, row by row."""
        self._moments = (0.0,) * 4
        self._set_theta(_ONES)

    def set_reported_rate(self, prefill_tokens_per_second: float) -> None:
        """Set a shard's own figure, which counts until there are observations. 0 = not known."""
        if prefill_tokens_per_second > 0 and not self.num_observations:
            factor = DEFAULT_PREFILL_TOKENS_PER_SECOND / prefill_tokens_per_second
            self._set_theta((factor, factor, factor, factor))

    @property
    def seconds_per_token(self) -> float:
        """For a short prompt on a shard that decodes nothing."""
        return self._in_seconds()[1]

    @property
    def coefficients(self) -> dict[str, float]:
        """In seconds: per request, per token, per pair of attention, and, per request, per token of context."""
        return dict(zip(("request", "token", "attention_pair", "context_token"), self._in_seconds(), strict=True))

    def seconds(self, work: PrefillWork, num_context_tokens: int) -> float:
        """The time that `work` takes while sequences with so many tokens of context decode."""
        per_request, per_token, per_pair, per_context_token = self._in_seconds()
        return (
            work.num_requests * (per_request + per_context_token * num_context_tokens)
            + per_token * work.num_tokens
            + per_pair * work.num_pairs
        )

    def request_seconds(self, num_tokens: int, num_cached_tokens: int, num_context_tokens: int) -> float:
        """`seconds` of one request's work, to the last bit; placement calls it once per shard."""
        per_request, per_token, per_pair, per_context_token = self._in_seconds()
        return (
            (per_request + per_context_token * num_context_tokens)
            + per_token * num_tokens
            + per_pair * (num_tokens * (num_cached_tokens + num_tokens / 2))
        )

    def num_tokens_within(self, seconds: float, num_cached_tokens: int, num_context_tokens: int) -> int:
        """The number of tokens after `num_cached_tokens` others that can be computed in that time. At least 1."""
        per_request, per_token, per_pair, per_context_token = self._in_seconds()
        rest = seconds - per_request - per_context_token * num_context_tokens
        per_token += per_pair * num_cached_tokens
        # Half of per_pair x the square, plus per_token x the number, is what may be spent.
        root = math.sqrt(per_token * per_token + 2 * per_pair * max(rest, 0.0))
        return max(1, int(2 * max(rest, 0.0) / (per_token + root)))

    def observe(self, work: PrefillWork, num_context_tokens: int, seconds: float) -> None:
        """`work` was all that the shard prefilled in `seconds`."""
        predicted = self.seconds(work, num_context_tokens)
        if predicted < MIN_SECONDS:
            predicted = MIN_SECONDS
        if seconds < predicted:
            seconds = max(seconds, predicted / MAX_SURPRISE)
            weight = 1.0 / predicted
        else:
            seconds = min(seconds, MAX_SURPRISE * predicted)
            weight = 1.0 / seconds
        s0, s1, s2, s3 = _SCALE
        x0 = weight * s0 * work.num_requests
        x1 = weight * s1 * work.num_tokens
        x2 = weight * s2 * work.num_pairs
        x3 = weight * s3 * num_context_tokens * work.num_requests
        y = weight * seconds
        p00, p01, p02, p03, p11, p12, p13, p22, p23, p33 = self._products
        self._products = (
            FORGETTING * p00 + x0 * x0,
            FORGETTING * p01 + x0 * x1,
            FORGETTING * p02 + x0 * x2,
            FORGETTING * p03 + x0 * x3,
            FORGETTING * p11 + x1 * x1,
            FORGETTING * p12 + x1 * x2,
            FORGETTING * p13 + x1 * x3,
            FORGETTING * p22 + x2 * x2,
            FORGETTING * p23 + x2 * x3,
            FORGETTING * p33 + x3 * x3,
        )
        m0, m1, m2, m3 = self._moments
        self._moments = (
            FORGETTING * m0 + x0 * y,
            FORGETTING * m1 + x1 * y,
            FORGETTING * m2 + x2 * y,
            FORGETTING * m3 + x3 * y,
        )
        self._descend()
        self.num_observations += 1

    def _in_seconds(self) -> tuple[float, float, float, float]:
        """The coefficients in seconds: the prior's as long as only the prior has observations."""
        prior = self._prior
        if self.num_observations or prior is None or not prior.num_observations:
            return self._known
        return prior._known

    def _set_theta(self, theta: tuple[float, float, float, float]) -> None:
        self.theta = theta
        """Coefficients as multiples of _SCALE, so that all are of the order of 1."""
        t0, t1, t2, t3 = theta
        s0, s1, s2, s3 = _SCALE
        self._known = (t0 * s0, t1 * s1, t2 * s2, t3 * s3)

    def _descend(self) -> None:
        """Each coefficient in turn becomes the best, given the others. The loop is unrolled, since it runs twice per
        request."""
        t0, t1, t2, t3 = self.theta
        q0, q1, q2, q3 = _ONES if self._prior is None else self._prior.theta
        p00, p01, p02, p03, p11, p12, p13, p22, p23, p33 = self._products
        m0, m1, m2, m3 = self._moments
        m0, m1, m2, m3 = m0 + PRIOR_WEIGHT * q0, m1 + PRIOR_WEIGHT * q1, m2 + PRIOR_WEIGHT * q2, m3 + PRIOR_WEIGHT * q3
        d0, d1, d2, d3 = p00 + PRIOR_WEIGHT, p11 + PRIOR_WEIGHT, p22 + PRIOR_WEIGHT, p33 + PRIOR_WEIGHT
        low0, low1, low2, low3 = _LOWEST
        for _ in range(NUM_SWEEPS):
            # `own` is added and subtracted again to keep the rounding: recorded runs repeat to the last bit.
            own = p00 * t0
            t0 = (m0 - (own + p01 * t1 + p02 * t2 + p03 * t3 - own)) / d0
            if t0 < low0:
                t0 = low0
            own = p11 * t1
            t1 = (m1 - (p01 * t0 + own + p12 * t2 + p13 * t3 - own)) / d1
            if t1 < low1:
                t1 = low1
            own = p22 * t2
            t2 = (m2 - (p02 * t0 + p12 * t1 + own + p23 * t3 - own)) / d2
            if t2 < low2:
                t2 = low2
            own = p33 * t3
            t3 = (m3 - (p03 * t0 + p13 * t1 + p23 * t2 + own - own)) / d3
            if t3 < low3:
                t3 = low3
        self._set_theta((t0, t1, t2, t3))


class FastestSpeed:
    """A lower bound of the prefill time on any of several shards: the lowest coefficients that one of them has had
    lately. It is low for a while when the fastest shard becomes slower."""

    __slots__ = ("_lowest", "num_noted")

    def __init__(self) -> None:
        self._lowest = (math.inf,) * 3
        self.num_noted = 0

    def note(self, speed: SpeedModel) -> None:
        """The coefficients of a shard, or of its prior, may be others than before."""
        (a, b, c, _), (low_a, low_b, low_c) = speed._in_seconds(), self._lowest
        if a < low_a or b < low_b or c < low_c:
            self._lowest = (min(a, low_a), min(b, low_b), min(c, low_c))
        self.num_noted += 1

    def request_seconds(self, num_tokens: int) -> float:
        """The least time that the prefill of so many tokens takes, of which none is cached."""
        per_request, per_token, per_pair = self._lowest
        return per_request + per_token * num_tokens + per_pair * (num_tokens * (num_tokens / 2))
