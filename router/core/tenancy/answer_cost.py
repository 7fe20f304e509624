"""Bounds what an answer uses of a hard budget, as a function of its length, before it is known how much of its prompt
is cached and how much of it is reasoning: never less than what it will really use."""

from __future__ import annotations

from typing import NamedTuple

from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.prices import Price


class AnswerCost(NamedTuple):
    """In hundredths of weighted tokens, or of billionths of the currency before the discount of batches."""

    fixed: int
    per_output_token: int
    percent: int
    rounds_up: bool

    def units(self, num_output_tokens: int) -> int:
        """Output tokens are those of all choices together."""
        hundredths = (self.fixed + self.per_output_token * num_output_tokens) * self.percent
        return -(-hundredths // 100) if self.rounds_up else hundredths // 100

    def affordable_tokens(self, units: int, most: int) -> int | None:
        """The most output tokens that cost no more than `units`, at most `most`; None: not even the prompt does."""
        if self.units(0) > units:
            return None
        if self.units(most) <= units:
            return most
        hundredths = 100 * units if self.rounds_up else 100 * units + 99
        return (hundredths // self.percent - self.fixed) // self.per_output_token


def token_cost(limits: Limits, num_prompt_tokens: int) -> AnswerCost:
    """Returns the cost in a budget of tokens."""
    fixed = max(100, limits.cached_token_percent) * num_prompt_tokens
    return AnswerCost(fixed, max(100, limits.reasoning_token_percent), 1, rounds_up=True)


def money_cost(price: Price, num_prompt_tokens: int, *, is_batch: bool) -> AnswerCost:
    """Returns the cost in a budget of money, in billionths of the currency."""
    fixed = price.request_nanos + max(price.prompt_nanos, price.cached_nanos) * num_prompt_tokens
    return AnswerCost(fixed, price.output_nanos, price.batch_percent if is_batch else 100, rounds_up=False)
