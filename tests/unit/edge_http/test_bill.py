"""What an answer costs."""

from __future__ import annotations

import pytest

from edge_http.answers.bill import AnswerBill
from kvloom.v1.generation_pb2 import SequenceFinish
from kvloom_common.tenancy.prices import Price, Prices, decimal

PRICES = Prices(
    [
        Price("old", "m", 0.0, prompt_nanos=100),
        Price("p", "m", 50.0, prompt_nanos=10, cached_nanos=1, output_nanos=30, request_nanos=7, batch_percent=50),
    ]
)


@pytest.mark.parametrize(
    ("nanos", "shown"), [(0, "0"), (1, "0.000000001"), (1_500_000_000, "1.5"), (2 * 10**9, "2"), (12_340, "0.00001234")]
)
def test_amounts_are_exact_decimals(nanos: int, shown: str) -> None:
    """Floating point numbers would round what people add up."""
    assert decimal(nanos) == shown


def test_an_answer_to_several_prompts_costs_what_its_requests_cost() -> None:
    """Routers meter each prompt as a request, with a prompt that counts once for all its choices."""
    bill = AnswerBill(PRICES, "m", 60.0, is_batch=False, remaining_nanos=1_000)
    finishes = {
        0: SequenceFinish(num_output_tokens=2, num_cached_tokens=4),
        1: SequenceFinish(num_output_tokens=3, num_cached_tokens=9),
        2: SequenceFinish(num_output_tokens=1),
        3: SequenceFinish(num_output_tokens=1),
    }
    first = 7 + 10 * 6 + 1 * 4 + 30 * 5
    second = 7 + 10 * 5 + 30 * 2
    assert bill.cost_nanos([10, 5], 2, finishes) == first + second
    assert bill.shown(338) == {"cost": "0.000000338", "budget_remaining": "0.000000662"}


def test_the_price_is_that_of_the_arrival_and_of_the_tier() -> None:
    """As the routers' records have it."""
    finishes = {0: SequenceFinish(num_output_tokens=1)}
    assert AnswerBill(PRICES, "m", 49.0, is_batch=False, remaining_nanos=None).cost_nanos([1], 1, finishes) == 100
    assert AnswerBill(PRICES, "m", 50.0, is_batch=True, remaining_nanos=None).cost_nanos([1], 1, finishes) == 23


def test_an_answer_that_another_model_continued_costs_what_both_parts_cost() -> None:
    """All of it had the first model's price, and its prompt once."""
    prices = Prices([*PRICES, Price("q", "large", prompt_nanos=1000, output_nanos=5000)])
    bill = AnswerBill(prices, "m", 60.0, is_batch=False, remaining_nanos=None)
    bill.add_part(10, 4, 2, has_answer=True)
    bill.continue_with("large", 61.0)
    bill.add_part(12, 0, 3, has_answer=True)
    whole = {0: SequenceFinish(num_output_tokens=5, num_cached_tokens=4)}
    assert bill.cost_nanos([10], 1, whole) == 7 + 10 * 6 + 1 * 4 + 30 * 2 + 12 * 1000 + 3 * 5000
