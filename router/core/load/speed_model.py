"""The prefill speed of one shard, learned from when first tokens came.

    seconds = c0 + c1·x + c2·x·(position + x/2) + c3·context

x = tokens computed after `position` cached ones (the second product is attention), context = tokens that decode in the
same steps. It is a Bayesian linear regression over the recent past without negative coefficients, so that a shard that
slows down is noticed, and shards of different speed are distinguished without configuration.

- The prior has the proportions of the four coefficients, from the rooflines of tools/simulate/fleet/profile.py. How
  fast the machine is follows from the first observation, however far it is from the default.
- Work of one kind tells only how many times slower the machine is than the prior. The proportions change as far as
  different work shows that they must.
- The normal equations are kept with exponential forgetting and solved by projected coordinate descent from the last
  solution (for the problem: Lawson and Hanson, Solving Least Squares Problems, ch. 23); unlike the recursive form this
  cannot become unstable.
- Every observation is weighted by the inverse of its duration, so that relative errors count alike for all prompts.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

DEFAULT_PREFILL_TOKENS_PER_SECOND: Final = 10_000.0
FORGETTING: Final = 0.98
"""Weight of the past per observation: about the last 50 count."""
PRIOR_WEIGHT: Final = 0.01
"""Weight of the prior's proportions, in observations: enough to fix what the shard's work does not determine."""
PEERS_WEIGHT: Final = 20.0
"""Weight of the belief that a shard is as fast as its peers, in observations."""
MAX_COUNTED: Final = 50
"""Observations that count, given FORGETTING."""
PRIOR_DEVIATION: Final = 1.0
"""Standard deviation of a coefficient of which nothing was seen, relative to its prior."""
NOISE_WEIGHT: Final = 0.05
"""Weight of the latest observation in the estimated noise."""
FIRST_NOISE: Final = 0.01
"""Variance of a relative error, before any was seen."""
NUM_SWEEPS: Final = 2
"""Sweeps of coordinate descent per observation."""
MIN_SECONDS: Final = 1e-3
MIN_OBSERVED_SECONDS: Final = 1e-4
"""Shorter ones tell nothing: results of several steps have come at the same time."""
MAX_SURPRISE: Final = 5.0
"""An observation counts as at most this many times its prediction, and at least this fraction of it: one stall must not
change much."""

_SECONDS_PER_TOKEN: Final = 1.0 / DEFAULT_PREFILL_TOKENS_PER_SECOND
_SCALE: Final = (
    100 * _SECONDS_PER_TOKEN,
    _SECONDS_PER_TOKEN,
    3e-5 * _SECONDS_PER_TOKEN,
    5e-4 * _SECONDS_PER_TOKEN,
)
"""The coefficients before anything is known."""
_NAMES: Final = ("request", "token", "attention_pair", "context_token")
_ONES: Final = (1.0, 1.0, 1.0, 1.0)
MIN_TOKEN: Final = 0.01
"""The lowest cost of a token, relative to its prior: it is never free."""


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

    __slots__ = ("_known", "_moments", "_noise", "_prior", "_products", "num_observations", "scale", "theta")

    def __init__(self, prior: SpeedModel | None = None) -> None:
        self.num_observations = 0
        self.scale = 1.0
        """How many times slower it is than the prior of all models."""
        self._noise = FIRST_NOISE
        self._prior = prior
        self._products = (0.0,) * 10
        """The symmetric matrix's upper half, row by row."""
        self._moments = (0.0,) * 4
        self._set_theta(_ONES)

    def set_reported_rate(self, prefill_tokens_per_second: float) -> None:
        """Set a shard's own figure, which counts until there are observations. 0 = not known."""
        if prefill_tokens_per_second > 0 and not self.num_observations:
            factor = DEFAULT_PREFILL_TOKENS_PER_SECOND / prefill_tokens_per_second
            self.scale = factor
            self._set_theta((factor, factor, factor, factor))

    @property
    def seconds_per_token(self) -> float:
        """For a short prompt on a shard that decodes nothing."""
        return self.known[1]

    @property
    def coefficients(self) -> dict[str, float]:
        """In seconds: per request, per token, per pair of attention, and, per request, per token of context."""
        return dict(zip(_NAMES, self.known, strict=True))

    def deviation_seconds(self, work: PrefillWork, num_context_tokens: int) -> float:
        """The standard deviation of `seconds`, without the noise of a single prefill."""
        s0, s1, s2, s3 = _SCALE
        return math.sqrt(
            self._variance(
                (
                    s0 * work.num_requests,
                    s1 * work.num_tokens,
                    s2 * work.num_pairs,
                    s3 * num_context_tokens * work.num_requests,
                )
            )
        )

    def seconds(self, work: PrefillWork, num_context_tokens: int) -> float:
        """The time that `work` takes while sequences with so many tokens of context decode."""
        per_request, per_token, per_pair, per_context_token = self.known
        return (
            work.num_requests * (per_request + per_context_token * num_context_tokens)
            + per_token * work.num_tokens
            + per_pair * work.num_pairs
        )

    def request_seconds(self, num_tokens: int, num_cached_tokens: int, num_context_tokens: int) -> float:
        """`seconds` of one request's work, to the last bit; placement calls it once per shard."""
        known, prior = self._known, self._prior
        if not self.num_observations and prior is not None and prior.num_observations:  # as in `known`
            known = prior._known
        per_request, per_token, per_pair, per_context_token = known
        return (
            (per_request + per_context_token * num_context_tokens)
            + per_token * num_tokens
            + per_pair * (num_tokens * (num_cached_tokens + num_tokens / 2))
        )

    def num_tokens_within(self, seconds: float, num_cached_tokens: int, num_context_tokens: int) -> int:
        """The number of tokens after `num_cached_tokens` others that can be computed in that time. At least 1."""
        per_request, per_token, per_pair, per_context_token = self.known
        rest = seconds - per_request - per_context_token * num_context_tokens
        per_token += per_pair * num_cached_tokens
        # Half of per_pair x the square, plus per_token x the number, is what may be spent.
        root = math.sqrt(per_token * per_token + 2 * per_pair * max(rest, 0.0))
        return max(1, int(2 * max(rest, 0.0) / (per_token + root)))

    def observe(self, work: PrefillWork, num_context_tokens: int, seconds: float) -> None:
        """`work` was all that the shard prefilled in `seconds`."""
        if seconds < MIN_OBSERVED_SECONDS:
            return
        if self.num_observations or (self._prior is not None and self._prior.num_observations):
            predicted = max(self.seconds(work, num_context_tokens), MIN_SECONDS)
            if seconds < predicted:
                seconds = max(seconds, predicted / MAX_SURPRISE)
                weight = 1.0 / predicted
            else:
                seconds = min(seconds, MAX_SURPRISE * predicted)
                weight = 1.0 / seconds
            error = (seconds - predicted) * weight
            self._noise += NOISE_WEIGHT * (error * error - self._noise)
        else:  # it tells how fast such machines are: nothing is known that it could surprise
            weight = 1.0 / max(seconds, MIN_SECONDS)
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
        self.num_observations += 1
        self._descend()

    def _variance(self, x: tuple[float, float, float, float]) -> float:
        """Returns the variance of the coefficients, in units of _SCALE, times x: x' A^-1 x, where A is the precision of
        what was seen and of the prior's belief that each coefficient is about as large as it says."""
        model = self if self.num_observations or self._prior is None else self._prior
        p00, p01, p02, p03, p11, p12, p13, p22, p23, p33 = model._products
        rows = [[p00, p01, p02, p03], [p01, p11, p12, p13], [p02, p12, p22, p23], [p03, p13, p23, p33]]
        deviation = PRIOR_DEVIATION * model.scale
        for i, row in enumerate(rows):
            for j in range(4):
                row[j] /= model._noise
            row[i] += 1 / (deviation * deviation)
            row.append(x[i])
        for i, pivot in enumerate(rows):  # by elimination; A is positive definite, so that no pivot is 0
            for row in rows[i + 1 :]:
                factor = row[i] / pivot[i]
                for j in range(i, 5):
                    row[j] -= factor * pivot[j]
        # A = L D L': x' A^-1 x is the sum of (L^-1 x)^2 / D.
        return sum(row[4] * row[4] / row[i] for i, row in enumerate(rows))

    @property
    def known(self) -> tuple[float, float, float, float]:
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
        p00, p01, p02, p03, p11, p12, p13, p22, p23, p33 = self._products
        m0, m1, m2, m3 = self._moments
        t0, t1, t2, t3 = self.theta
        prior = self._prior
        q0, q1, q2, q3 = _ONES if prior is None else prior.theta
        # How many times slower than the prior: all that work of one kind can tell. Of a shard, its peers tell as well.
        r0, r1 = p00 * q0 + p01 * q1 + p02 * q2 + p03 * q3, p01 * q0 + p11 * q1 + p12 * q2 + p13 * q3
        r2, r3 = p02 * q0 + p12 * q1 + p22 * q2 + p23 * q3, p03 * q0 + p13 * q1 + p23 * q2 + p33 * q3
        factor = (m0 * q0 + m1 * q1 + m2 * q2 + m3 * q3) / (r0 * q0 + r1 * q1 + r2 * q2 + r3 * q3)
        scale = factor
        if prior is not None and prior.num_observations:
            num_own = min(self.num_observations, MAX_COUNTED)
            factor = (num_own * factor + PEERS_WEIGHT) / (num_own + PEERS_WEIGHT)
            scale = factor * prior.scale
        q0, q1, q2, q3 = q0 * factor, q1 * factor, q2 * factor, q3 * factor
        if self.num_observations == 1:
            t0, t1, t2, t3 = q0, q1, q2, q3
        else:
            change = scale / self.scale
            t0, t1, t2, t3 = t0 * change, t1 * change, t2 * change, t3 * change
        self.scale = scale
        ridge = PRIOR_WEIGHT / (scale * scale)
        m0, m1, m2, m3 = m0 + ridge * q0, m1 + ridge * q1, m2 + ridge * q2, m3 + ridge * q3
        d0, d1, d2, d3 = p00 + ridge, p11 + ridge, p22 + ridge, p33 + ridge
        lowest = MIN_TOKEN * q1
        for _ in range(NUM_SWEEPS):
            t0 = (m0 - p01 * t1 - p02 * t2 - p03 * t3) / d0
            if t0 < 0.0:
                t0 = 0.0
            t1 = (m1 - p01 * t0 - p12 * t2 - p13 * t3) / d1
            if t1 < lowest:
                t1 = lowest
            t2 = (m2 - p02 * t0 - p12 * t1 - p23 * t3) / d2
            if t2 < 0.0:
                t2 = 0.0
            t3 = (m3 - p03 * t0 - p13 * t1 - p23 * t2) / d3
            if t3 < 0.0:
                t3 = 0.0
        self._set_theta((t0, t1, t2, t3))
