"""How much less likely a candidate finds the answers of a model than the model itself does: the likelihood gap.

The gap of an answer is the sum over its tokens of log p(token) under the model minus log p(token) under the candidate,
in nats. Divided by the number of tokens, over many answers, it estimates the relative entropy (Kullback-Leibler
divergence) per token from the model to the candidate, if tokens are sampled at temperature 1. Equal models have 0.

Tokens of one answer depend on one another, so answers are what is sampled, and the gap per token is a ratio of two
sums: a ratio estimator over clusters (W. G. Cochran, Sampling Techniques, 3rd edition, 1977, chapters 6 and 9A). All
that it needs is a few sums, so those of several routers, or of a window of time, are had by adding and subtracting.

Everything here is pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from statistics import NormalDist
from typing import Final, NamedTuple

ANSWERS: Final = "kvloom_router_shadow_scored_answers"
TOKENS: Final = "kvloom_router_shadow_scored_tokens"
SURPRISAL: Final = "kvloom_router_shadow_surprisal_nats"
SQUARED_TOKENS: Final = "kvloom_router_shadow_tokens_squared"
SURPRISAL_TOKENS: Final = "kvloom_router_shadow_surprisal_token_products"
SQUARED_GAP: Final = "kvloom_router_shadow_gap_squared"
"""The counters in which routers export the sums, by model and candidate. Those of surprisals (minus log p, which is
never negative, so that the counters only grow) have one more label, `under`, with the values of the next two."""
UNDER_MODEL: Final = "model"
UNDER_CANDIDATE: Final = "candidate"

COUNTERS: Final = (ANSWERS, TOKENS, SURPRISAL, SQUARED_TOKENS, SURPRISAL_TOKENS, SQUARED_GAP)

MIN_ANSWERS: Final = 10
"""With fewer answers nothing is judged: the intervals hold for means of many."""
TUNED_FOR: Final = 50
"""The number of answers for which the bound that holds at any time is tightest."""


@dataclasses.dataclass(frozen=True, slots=True)
class GapSums:
    """The sums over answers; n is an answer's number of tokens, g its gap in nats."""

    num_answers: float = 0.0
    tokens: float = 0.0
    gap: float = 0.0
    squared_tokens: float = 0.0
    gap_tokens: float = 0.0
    """The sum of g times n."""
    squared_gap: float = 0.0

    @staticmethod
    def of(num_tokens: int, gap: float) -> GapSums:
        """Those of one answer."""
        return GapSums(1.0, num_tokens, gap, num_tokens * num_tokens, gap * num_tokens, gap * gap)

    def __add__(self, other: GapSums) -> GapSums:
        return GapSums(*(a + b for a, b in zip(self.fields, other.fields, strict=True)))

    def __sub__(self, other: GapSums) -> GapSums:
        """Returns what has come since `other`."""
        return GapSums(*(a - b for a, b in zip(self.fields, other.fields, strict=True)))

    @property
    def fields(self) -> tuple[float, ...]:
        return self.num_answers, self.tokens, self.gap, self.squared_tokens, self.gap_tokens, self.squared_gap

    @property
    def gap_per_token(self) -> float:
        """In nats; 0 without tokens."""
        return self.gap / self.tokens if self.tokens > 0 else 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation of one answer's part in the gap per token: of (g - r n) / mean(n), where r is the gap
        per token (Taylor's linearization). 0 for fewer than two answers."""
        if self.num_answers < 2 or self.tokens <= 0:
            return 0.0
        ratio = self.gap_per_token
        residuals = self.squared_gap - 2 * ratio * self.gap_tokens + ratio * ratio * self.squared_tokens
        # Rounding may leave a little below 0 where all residuals are 0.
        variance = max(0.0, residuals) / (self.num_answers - 1)
        return math.sqrt(variance) * self.num_answers / self.tokens


class GapInterval(NamedTuple):
    """The gap in nats per token."""

    mean: float
    low: float
    high: float


def gap_interval(sums: GapSums, confidence: float = 0.95) -> GapInterval | None:
    """The two-sided confidence interval for a number of answers that was fixed in advance, by the normal approximation
    (Cochran, equation 6.13). None for fewer than MIN_ANSWERS."""
    if sums.num_answers < MIN_ANSWERS:
        return None
    quantile = NormalDist().inv_cdf(0.5 + confidence / 2)
    radius = quantile * sums.deviation / math.sqrt(sums.num_answers)
    return GapInterval(sums.gap_per_token, sums.gap_per_token - radius, sums.gap_per_token + radius)


def lower_bound_at_any_time(sums: GapSums, error_rate: float = 0.05) -> float:
    """A lower bound of the gap in nats per token that may be looked at after every answer: the probability that it ever
    exceeds the true gap is at most about `error_rate`. Minus infinity for fewer than MIN_ANSWERS.

    It is the one-sided asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, Time-uniform
    central limit theory and asymptotic confidence sequences (Annals of Statistics 52(6), 2024), whose boundary is the
    one-sided normal mixture of Howard, Ramdas, McAuliffe and Sekhon (Annals of Statistics 49(2), 2021). A bound for a
    fixed number of answers would exceed the true gap sooner or later if it were looked at again and again.
    """
    count = sums.num_answers
    if count < MIN_ANSWERS:
        return -math.inf
    log_rate = -2 * math.log(error_rate)
    scale = count * (log_rate + math.log(log_rate) + 1) / TUNED_FOR
    """The number of answers times the squared parameter of the mixture (their section 3.4)."""
    boundary = 2 * (scale + 1) / scale * math.log(1 + math.sqrt(scale + 1) / (2 * error_rate))
    return sums.gap_per_token - sums.deviation * math.sqrt(boundary / count)


def num_answers_until(answers: Iterable[tuple[int, float]], threshold: float, error_rate: float = 0.05) -> int | None:
    """After how many of the answers (numbers of tokens, gaps) the bound at any time exceeds `threshold` nats per token.
    None: it never does."""
    sums = GapSums()
    for count, (num_tokens, gap) in enumerate(answers, 1):
        sums += GapSums.of(num_tokens, gap)
        if lower_bound_at_any_time(sums, error_rate) > threshold:
            return count
    return None


def gap_sums_of(samples: Iterable[tuple[str, Mapping[str, str], float]], model: str, candidate: str) -> GapSums:
    """The sums of all routers whose scraped samples these are: names, labels and values. A window's are the difference
    of two scrapes (of each router, which begins at 0 when it starts)."""
    found: dict[tuple[str, str], float] = {}
    for name, labels, value in samples:
        if labels.get("model") == model and labels.get("candidate") == candidate:
            key = name.removesuffix("_total"), labels.get("under", "")
            found[key] = found.get(key, 0.0) + value

    def total(name: str) -> float:
        return found.get((name, ""), 0.0)

    def difference(name: str) -> float:
        return found.get((name, UNDER_CANDIDATE), 0.0) - found.get((name, UNDER_MODEL), 0.0)

    return GapSums(
        total(ANSWERS),
        total(TOKENS),
        difference(SURPRISAL),
        total(SQUARED_TOKENS),
        difference(SURPRISAL_TOKENS),
        total(SQUARED_GAP),
    )
