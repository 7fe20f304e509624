"""Computes what a request costs: integers of billionths of the currency, so that sums are exact."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec


class Price(msgspec.Struct, frozen=True):
    """The message `Price` in control_service.proto describes every field."""

    id: str
    model: str
    effective_from: float = 0.0
    prompt_nanos: int = 0
    cached_nanos: int = 0
    output_nanos: int = 0
    request_nanos: int = 0
    batch_percent: int = 100
    result_cache_percent: int = 0

    def cost_nanos(
        self,
        num_prompt: int,
        num_cached: int,
        num_output: int,
        *,
        is_batch: bool = False,
        is_result_cache_hit: bool = False,
    ) -> int:
        """Rounded down to whole billionths."""
        cost = (
            self.request_nanos
            + self.prompt_nanos * (num_prompt - num_cached)
            + self.cached_nanos * num_cached
            + self.output_nanos * num_output
        )
        if is_batch:
            cost = cost * self.batch_percent // 100
        return cost * self.result_cache_percent // 100 if is_result_cache_hit else cost


FREE = Price("", "*")
_MAX_FOUND: Final = 1024
"""Models whose price is remembered. When there are more, all are forgotten."""
_InForce = tuple[Price, float, float]
"""A price, and from when until when (seconds since 1970) it is surely in force."""
NANOS = 1_000_000_000


def decimal(nanos: int) -> str:
    """Billionths of the currency as a decimal number, exact: "0.00001234"."""
    whole, rest = divmod(nanos, NANOS)
    return f"{whole}.{rest:09d}".rstrip("0") if rest else str(whole)


class Prices:
    """The prices of all models over time."""

    def __init__(self, prices: Iterable[Price] = ()) -> None:
        self._by_model: dict[str, list[Price]] = {}
        for price in sorted(prices, key=lambda one: one.effective_from, reverse=True):
            self._by_model.setdefault(price.model, []).append(price)
        self._found: dict[str, _InForce] = {}

    def at(self, model: str, seconds_since_1970: float) -> Price:
        """The price in force for a model, or MODEL:ADAPTER: its own, else that of the adapter's model, else that of
        "*"; FREE if there is none."""
        found = self._found.get(model)
        if found is None or not found[1] <= seconds_since_1970 < found[2]:
            if len(self._found) >= _MAX_FOUND:
                self._found.clear()
            found = self._found[model] = self._find(model, seconds_since_1970)
        return found[0]

    def _find(self, model: str, seconds_since_1970: float) -> _InForce:
        begins_at, ends_at = -math.inf, math.inf
        in_force: Price | None = None
        for name in dict.fromkeys((model, model.partition(":")[0], "*")):
            for price in self._by_model.get(name, ()):
                if price.effective_from > seconds_since_1970:
                    ends_at = min(ends_at, price.effective_from)
                    continue
                begins_at = max(begins_at, price.effective_from)
                in_force = in_force or price
        return in_force or FREE, begins_at, ends_at

    def cost(
        self,
        model: str,
        seconds_since_1970: float,
        num_prompt: int,
        num_cached: int,
        num_output: int,
        *,
        has_answer: bool,
        is_batch: bool = False,
        is_result_cache_hit: bool = False,
    ) -> tuple[str, int]:
        """(the id of the price, billionths of the currency) of a request for a model, or MODEL:ADAPTER. `has_answer`:
        it has an output token, or ended as it should. What failed before that is free."""
        price = self.at(model, seconds_since_1970)
        if not has_answer:
            return price.id, 0
        cost = price.cost_nanos(
            num_prompt, num_cached, num_output, is_batch=is_batch, is_result_cache_hit=is_result_cache_hit
        )
        return price.id, cost

    def __iter__(self):
        for prices in self._by_model.values():
            yield from prices
