"""How long prefill takes on one shard, learned from when first tokens came.

    seconds = c0 + c1·x + c2·x·(position + x/2) + c3·context

x = tokens computed behind `position` cached ones (the second product is attention), context = tokens that decode in the
same steps. Least squares over the recent past, with a weak prior and no negative coefficient: a shard that slows down
is found out, and shards of different speed are told apart without anybody configuring it. The normal equations are kept
with exponential forgetting and solved by projected coordinate descent that goes on from the last solution (for the
problem: Lawson and Hanson, Solving Least Squares Problems, ch. 23); unlike the recursive form this cannot become
unstable. Every observation is weighted by the inverse of its duration: relative errors count alike for all prompts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

DEFAULT_PREFILL_TOKENS_PER_SECOND: Final = 10_000.0
FORGETTING: Final = 0.98
"""Weight of the past per observation: about the last 50 count."""
PRIOR_WEIGHT: Final = 0.05
"""Of the prior, in observations: enough to keep in place what the shard's work does not tell about."""
NUM_SWEEPS: Final = 3
"""Of coordinate descent for one observation."""
MIN_SECONDS: Final = 1e-3
MAX_SURPRISE: Final = 5.0
"""An observation counts as at most this many times its prediction, or at least this part of it: one stall must not
change much."""

_SECONDS_PER_TOKEN: Final = 1.0 / DEFAULT_PREFILL_TOKENS_PER_SECOND
_SCALE: Final = (
    100 * _SECONDS_PER_TOKEN,
    _SECONDS_PER_TOKEN,
    1e-5 * _SECONDS_PER_TOKEN,
    2e-4 * _SECONDS_PER_TOKEN,
)
"""What the coefficients are before anything is known."""
_ONES: Final = (1.0, 1.0, 1.0, 1.0)
_LOWEST: Final = (0.0, 0.01, 0.0, 0.0)
"""Of a coefficient, relative to its prior: a token is never free."""


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
    """One shard's coefficients, or those of a whole fleet, which its shards have as their prior: so a new shard is
    thought to be like its peers, and gets work by which it can be told apart."""

    __slots__ = ("_moments", "_prior", "_products", "num_observations", "theta")

    def __init__(self, prior: SpeedModel | None = None) -> None:
        self.num_observations = 0
        self._prior = prior
        self.theta = [1.0, 1.0, 1.0, 1.0]
        """Coefficients as multiples of _SCALE, so that all are of the order of 1."""
        self._products = [[0.0] * 4 for _ in range(4)]
        self._moments = [0.0] * 4

    def tell(self, prefill_tokens_per_second: float) -> None:
        """A shard's own figure; counts until there are observations. 0 = not known."""
        if prefill_tokens_per_second > 0 and not self.num_observations:
            self.theta = [DEFAULT_PREFILL_TOKENS_PER_SECOND / prefill_tokens_per_second] * 4

    @property
    def seconds_per_token(self) -> float:
        """Of a short prompt on a shard that decodes nothing."""
        return self._known()[1] * _SCALE[1]

    @property
    def coefficients(self) -> dict[str, float]:
        """In seconds: of a request, of a token, of a pair of attention, and, per request, of a token of context."""
        c0, c1, c2, c3 = (t * s for t, s in zip(self._known(), _SCALE, strict=True))
        return {"request": c0, "token": c1, "attention_pair": c2, "context_token": c3}

    def seconds(self, work: PrefillWork, num_context_tokens: int) -> float:
        """What `work` takes, while sequences with so many tokens of context decode."""
        t, s = self._known(), _SCALE
        return (
            work.num_requests * (t[0] * s[0] + t[3] * s[3] * num_context_tokens)
            + t[1] * s[1] * work.num_tokens
            + t[2] * s[2] * work.num_pairs
        )

    def request_seconds(self, num_tokens: int, num_cached_tokens: int, num_context_tokens: int) -> float:
        """`seconds` of one request's work, to the last bit; placement asks for it once a shard."""
        t, s = self._known(), _SCALE
        num_pairs = num_tokens * (num_cached_tokens + num_tokens / 2)
        return t[0] * s[0] + t[3] * s[3] * num_context_tokens + t[1] * s[1] * num_tokens + t[2] * s[2] * num_pairs

    def num_tokens_within(self, seconds: float, num_cached_tokens: int, num_context_tokens: int) -> int:
        """How many tokens behind `num_cached_tokens` others can be computed in that time. At least 1."""
        t, s = self._known(), _SCALE
        rest = seconds - t[0] * s[0] - t[3] * s[3] * num_context_tokens
        per_pair = t[2] * s[2]
        per_token = t[1] * s[1] + per_pair * num_cached_tokens
        # Half of per_pair x the square, plus per_token x the number, is what may be spent.
        root = math.sqrt(per_token * per_token + 2 * per_pair * max(rest, 0.0))
        return max(1, int(2 * max(rest, 0.0) / (per_token + root)))

    def observe(self, work: PrefillWork, num_context_tokens: int, seconds: float) -> None:
        """`work` was all that the shard prefilled in `seconds`."""
        predicted = max(self.seconds(work, num_context_tokens), MIN_SECONDS)
        seconds = min(max(seconds, predicted / MAX_SURPRISE), MAX_SURPRISE * predicted)
        s = _SCALE
        weight = 1.0 / max(seconds, predicted)
        x = (
            weight * s[0] * work.num_requests,
            weight * s[1] * work.num_tokens,
            weight * s[2] * work.num_pairs,
            weight * s[3] * num_context_tokens * work.num_requests,
        )
        y = weight * seconds
        for i in range(4):
            row = self._products[i]
            for j in range(4):
                row[j] = FORGETTING * row[j] + x[i] * x[j]
            self._moments[i] = FORGETTING * self._moments[i] + x[i] * y
        self._descend()
        self.num_observations += 1

    def _known(self) -> list[float]:
        if self.num_observations or self._prior is None:
            return self.theta
        return self._prior.theta if self._prior.num_observations else self.theta

    def _descend(self) -> None:
        theta = self.theta
        prior = _ONES if self._prior is None else self._prior.theta
        for _ in range(NUM_SWEEPS):
            for i in range(4):
                row = self._products[i]
                others = row[0] * theta[0] + row[1] * theta[1] + row[2] * theta[2] + row[3] * theta[3]
                gradient = self._moments[i] + PRIOR_WEIGHT * prior[i] - (others - row[i] * theta[i])
                theta[i] = max(gradient / (row[i] + PRIOR_WEIGHT), _LOWEST[i])
