"""Prices become bills: they must be exact, and those of the right day."""

from __future__ import annotations

from kvloom_common.tenancy.limits import Limits
from kvloom_common.tenancy.prices import FREE, Price, Prices


def test_the_price_in_force_is_that_of_the_model_and_the_time() -> None:
    """A price does not change what was used before it, and an adapter costs what its model costs unless it has its own
    price."""
    prices = Prices([Price("p1", "m", 0.0), Price("p2", "m", 10.0), Price("p3", "m:a", 5.0), Price("p4", "*", 3.0)])
    assert prices.at("m", 9.9).id == "p1"
    assert prices.at("m", 10.0).id == "p2"
    assert prices.at("m:a", 10.0).id == "p3"
    assert prices.at("m:b", 10.0).id == "p2"
    assert prices.at("x", 10.0).id == "p4"
    assert prices.at("x", 1.0) is FREE


def test_costs_are_whole_billionths() -> None:
    """Cached tokens, batch requests and answers from the result cache have prices of their own."""
    price = Price("p", "m", 0.0, 10, 1, 40, 5, batch_percent=50, result_cache_percent=10)
    assert price.cost_nanos(100, 60, 7) == 5 + 400 + 60 + 280
    assert price.cost_nanos(100, 60, 7, is_batch=True) == 372
    assert price.cost_nanos(100, 60, 7, is_result_cache_hit=True) == 74


def test_weighted_tokens_are_rounded_up() -> None:
    """Otherwise a limit could be passed by many small requests."""
    limits = Limits(cached_token_percent=10, reasoning_token_percent=50)
    assert limits.weighted_tokens(10, 5, 4, 2) == 5 + 1 + 2 + 1
