"""AnswerBill computes what an answer costs, and what is left of its caller's budget: in a fabric with tenants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvloom.v1.generation_pb2 import RESULT_CACHE_USE_HIT, SequenceFinish
from kvloom_common.tenancy.prices import Prices, decimal


class AnswerBill:
    """By the prices at the time when the request arrived. Of an answer that other models have continued, each part has
    the price of its own model when that took it."""

    __slots__ = ("_arrived_at", "_is_batch", "_is_continued", "_model", "_parts_nanos", "_prices", "_remaining_nanos")

    def __init__(
        self, prices: Prices, model: str, arrived_at: float, *, is_batch: bool, remaining_nanos: int | None
    ) -> None:
        """`remaining_nanos`: what was left of the budget a few seconds ago; None: there is no budget, or nothing is
        known of it."""
        self._prices = prices
        self._model = model
        self._arrived_at = arrived_at
        self._is_batch = is_batch
        self._remaining_nanos = remaining_nanos
        self._is_continued = False
        self._parts_nanos = 0
        """The cost of the parts that have ended, in billionths of the currency."""

    def add_part(self, num_prompt: int, num_cached: int, num_output: int, *, has_answer: bool) -> None:
        """A part of an answer that is continued has ended, or the last one."""
        _, cost = self._prices.cost(
            self._model, self._arrived_at, num_prompt, num_cached, num_output,
            has_answer=has_answer, is_batch=self._is_batch,
        )  # fmt: skip
        self._parts_nanos += cost

    def continue_with(self, model: str, arrived_at: float) -> None:
        """Another model takes the next part now."""
        self._model, self._arrived_at, self._is_continued = model, arrived_at, True

    def cost_nanos(self, prompt_sizes: Sequence[int], n: int, finishes: Mapping[int, SequenceFinish]) -> int:
        """Returns the cost of an answer that has ended well, in billionths of the currency, as its routers compute
        it."""
        if self._is_continued:
            return self._parts_nanos
        cost = 0
        for number, size in enumerate(prompt_sizes):
            of_prompt = [finishes[index] for index in range(number * n, (number + 1) * n) if index in finishes]
            if of_prompt:
                num_output = sum(finish.num_output_tokens for finish in of_prompt)
                num_cached = of_prompt[0].num_cached_tokens
                cost += self._prices.cost(
                    self._model, self._arrived_at, size, num_cached, num_output,
                    has_answer=True, is_batch=self._is_batch,
                    is_result_cache_hit=of_prompt[0].result_cache == RESULT_CACHE_USE_HIT,
                )[1]  # fmt: skip
        return cost

    def shown(self, cost_nanos: int) -> dict[str, str]:
        """In units of the currency: `cost`, and `budget_remaining` if it is known."""
        found = {"cost": decimal(cost_nanos)}
        if self._remaining_nanos is not None:
            found["budget_remaining"] = decimal(max(0, self._remaining_nanos - cost_nanos))
        return found
