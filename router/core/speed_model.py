"""How long prefill takes on one shard, learned from when first tokens came.

    seconds = c0 + c1·x + c2·x·(position + x/2) + c3·context

x = tokens computed behind `position` cached ones (the second product is attention), context = tokens that decode in the
same steps. Recursive least squares with forgetting (Haykin, Adaptive Filter Theory, ch. 10), so a shard that slows down
is found out, and shards of different speed are told apart without anybody configuring it. Every observation is weighted
by the inverse of its duration: relative errors count alike for short and long prompts.
"""

from __future__ import annotations

import dataclasses
from typing import Final

DEFAULT_PREFILL_TOKENS_PER_SECOND: Final = 10_000.0
FORGETTING: Final = 0.98
"""Weight of the past per observation: about the last 50 count."""
MAX_VARIANCE: Final = 4.0
"""Of a coefficient, relative to its prior: forgetting must not blow up what the shard's work does not tell about."""
MIN_SECONDS: Final = 1e-3
NOISE: Final = 0.02
"""Variance of an observation's relative error: chunks shared with neighbours, links."""
MAX_SURPRISE: Final = 5.0
"""An observation counts as at most this many times its prediction: one stall must not change the model."""

# The prior's mean of each coefficient, as multiples of the seconds per token that the shard (or the default) says.
_PRIOR_CONSTANT_TOKENS: Final = 100.0
_PRIOR_PAIR_SHARE: Final = 1e-5
_PRIOR_CONTEXT_SHARE: Final = 2e-4


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillWork:
    """What prefill computes, for one request or a sum over several. Adding is exact, as the model is linear."""

    num_requests: int = 0
    num_tokens: int = 0
    num_pairs: float = 0.0
    """Attention: tokens x positions they look at."""

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
    """One shard's coefficients."""

    __slots__ = ("_covariance", "_scale", "_theta", "_told_seconds_per_token", "num_observations")

    def __init__(self) -> None:
        self.num_observations = 0
        self._told_seconds_per_token = 0.0
        self._start_from(1.0 / DEFAULT_PREFILL_TOKENS_PER_SECOND)

    def tell(self, prefill_tokens_per_second: float) -> None:
        """The shard's own figure, the prior until there are observations. 0 = not known."""
        if prefill_tokens_per_second > 0 and not self.num_observations:
            seconds_per_token = 1.0 / prefill_tokens_per_second
            if seconds_per_token != self._told_seconds_per_token:
                self._told_seconds_per_token = seconds_per_token
                self._start_from(seconds_per_token)

    @property
    def seconds_per_token(self) -> float:
        """Of a short prompt on a shard that decodes nothing."""
        return max(self._theta[1], 0.05) * self._scale[1]

    @property
    def coefficients(self) -> dict[str, float]:
        """In seconds: of a request, of a token, of a pair of attention, and, per request, of a token of context."""
        c0, c1, c2, c3 = (max(t, 0.0) * s for t, s in zip(self._theta, self._scale, strict=True))
        return {"request": c0, "token": max(c1, self.seconds_per_token), "attention_pair": c2, "context_token": c3}

    def seconds(self, work: PrefillWork, num_context_tokens: int) -> float:
        """What `work` takes, while sequences with so many tokens of context decode."""
        t, s = self._theta, self._scale
        constant = max(t[0], 0.0) * s[0] + max(t[3], 0.0) * s[3] * num_context_tokens
        return (
            work.num_requests * constant
            + max(t[1], 0.05) * s[1] * work.num_tokens
            + max(t[2], 0.0) * s[2] * work.num_pairs
        )

    def observe(self, work: PrefillWork, num_context_tokens: int, seconds: float) -> None:
        """`work` was all that the shard prefilled in `seconds`."""
        predicted = max(self.seconds(work, num_context_tokens), MIN_SECONDS)
        seconds = min(max(seconds, MIN_SECONDS), MAX_SURPRISE * predicted)
        weight = 1.0 / max(seconds, predicted)
        s = self._scale
        features = (
            weight * s[0] * work.num_requests,
            weight * s[1] * work.num_tokens,
            weight * s[2] * work.num_pairs,
            weight * s[3] * num_context_tokens * work.num_requests,
        )
        self.num_observations += 1
        self._update(features, weight * seconds)

    def _start_from(self, seconds_per_token: float) -> None:
        """Coefficients are kept as multiples of their prior means, so that all are of the order of 1."""
        self._scale = (
            _PRIOR_CONSTANT_TOKENS * seconds_per_token,
            seconds_per_token,
            _PRIOR_PAIR_SHARE * seconds_per_token,
            _PRIOR_CONTEXT_SHARE * seconds_per_token,
        )
        self._theta = [1.0, 1.0, 1.0, 1.0]
        self._covariance = [[1.0 if i == j else 0.0 for j in range(4)] for i in range(4)]

    def _update(self, x: tuple[float, float, float, float], y: float) -> None:
        p, theta = self._covariance, self._theta
        px = [row[0] * x[0] + row[1] * x[1] + row[2] * x[2] + row[3] * x[3] for row in p]
        denominator = NOISE + x[0] * px[0] + x[1] * px[1] + x[2] * px[2] + x[3] * px[3]
        gain = [value / denominator for value in px]
        error = y - (x[0] * theta[0] + x[1] * theta[1] + x[2] * theta[2] + x[3] * theta[3])
        for i in range(4):
            theta[i] += gain[i] * error
            row = p[i]
            for j in range(4):
                row[j] -= gain[i] * px[j]
        if max(p[0][0], p[1][1], p[2][2], p[3][3]) < MAX_VARIANCE * FORGETTING:
            for row in p:
                for j in range(4):
                    row[j] /= FORGETTING
