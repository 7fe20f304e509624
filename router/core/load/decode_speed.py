"""How long one decode step takes, learned from what shards report.

    seconds = base + slope x tokens of context that decode

The line is fitted to the recent reports of all shards of a model by least squares, weighted so that relative errors
count alike. A shard that is slower or faster than the others has a factor of its own.
"""

from __future__ import annotations

from typing import Final

FORGETTING: Final = 0.99
"""Weight of the past per report: about the last 100 count."""
RIDGE: Final = 1e-3
"""Weight of the belief that context costs nothing, relative to what was seen: reports of one size tell no slope."""
FACTOR_SMOOTHING: Final = 0.1
"""Weight of a new report in a shard's factor."""
MAX_FACTOR: Final = 5.0
"""A report counts as at most this many times what the line says, and at least this fraction of it."""
DEFAULT_TPOT_SECONDS: Final = 0.1
"""The objective for the time per token of requests that name none."""
_MILLION: Final = 1e6
"""Tokens are counted in millions, so that the sums are of the order of 1."""


class DecodeSpeed:
    """The line of one model. It is flat at 0 until there are reports."""

    __slots__ = ("_sum_w", "_sum_wx", "_sum_wxx", "_sum_wxy", "_sum_wy", "base_seconds", "seconds_per_token")

    def __init__(self) -> None:
        self._sum_w = self._sum_wx = self._sum_wy = self._sum_wxx = self._sum_wxy = 0.0
        self.base_seconds = 0.0
        """The duration of a step without context: reading the weights."""
        self.seconds_per_token = 0.0
        """By how much a step is longer for each token of context."""

    def observe(self, num_context_tokens: int, step_seconds: float) -> None:
        """A shard with so many tokens of context reports this duration, above 0."""
        x, weight = num_context_tokens / _MILLION, 1.0 / (step_seconds * step_seconds)
        self._sum_w = FORGETTING * self._sum_w + weight
        self._sum_wx = FORGETTING * self._sum_wx + weight * x
        self._sum_wy = FORGETTING * self._sum_wy + weight * step_seconds
        self._sum_wxx = FORGETTING * self._sum_wxx + weight * x * x
        self._sum_wxy = FORGETTING * self._sum_wxy + weight * x * step_seconds
        mean_x, mean_y = self._sum_wx / self._sum_w, self._sum_wy / self._sum_w
        spread = self._sum_wxx - self._sum_wx * mean_x
        slope = max(0.0, (self._sum_wxy - self._sum_wx * mean_y) / (spread + RIDGE * self._sum_wxx))
        self.base_seconds = max(0.0, mean_y - slope * mean_x)
        self.seconds_per_token = slope / _MILLION

    def step_seconds(self, num_context_tokens: int) -> float:
        """0: not known yet."""
        return self.base_seconds + self.seconds_per_token * num_context_tokens

    def learned_factor(self, factor: float, num_context_tokens: int, step_seconds: float) -> float:
        """The factor of a shard that has reported this duration."""
        expected = self.step_seconds(num_context_tokens)
        if expected <= 0:
            return factor
        ratio = min(max(step_seconds / expected, 1 / MAX_FACTOR), MAX_FACTOR)
        return factor + FACTOR_SMOOTHING * (ratio - factor)

    def used_slack(self, num_context_tokens: int, factor: float, max_step_seconds: float) -> float:
        """The share of the time between a step without context and the longest one that meets the objective for the
        time per token that this much context takes, on a shard with that factor. At most 1: the objective is
        missed."""
        of_context = self.seconds_per_token * num_context_tokens * factor
        slack = max_step_seconds - self.base_seconds * factor
        return of_context / slack if of_context < slack else 1.0


def shared_tokens(num_tokens: float, others_tokens: float) -> float:
    """For how many tokens two answers decode beside each other, whose lengths are exponential with these means: the
    mean of the shorter one."""
    total = num_tokens + others_tokens
    return num_tokens * others_tokens / total if total else 0.0
