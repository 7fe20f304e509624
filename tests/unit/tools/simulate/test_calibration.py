"""How well predictions came true, recomputed by hand."""

from __future__ import annotations

import pytest

from tools.simulate.calibration import calibrate, combine_calibrations
from tools.simulate.workload import Call, Outcome


def outcome(*predictions: tuple[str, float, float | None]) -> Outcome:
    return Outcome(Call(0, 1, 1, ()), 0.0, 0, 0, 0.0, 0.0, predictions=predictions)


def test_errors_are_what_happened_minus_what_was_predicted():
    """A positive mean says that things take longer than predicted; absolute errors do not cancel each other out."""
    found = calibrate([outcome(("ttft", 1.0, 1.2)), outcome(("ttft", 1.0, 0.4)), outcome(("ttft", 1.0, 1.0))])["ttft"]
    assert found.mean_error == pytest.approx(-0.4 / 3)
    assert found.p50_absolute_error == pytest.approx(0.2)
    assert found.p90_absolute_error == pytest.approx(0.2 + 0.8 * 0.4)
    assert found.share_within_25_percent == pytest.approx(2 / 3)
    assert found.num_predictions == 3


def test_a_few_milliseconds_are_always_close():
    """An error of 3 ms is half of a wait of 6 ms, and nobody notices it."""
    found = calibrate([outcome(("waiting", 0.003, 0.006)), outcome(("waiting", 0.0, 0.006))])
    assert found["waiting"].share_within_25_percent == 0.5


def test_what_did_not_happen_is_not_judged():
    """A request that was cancelled before its first token says nothing about its prediction."""
    assert calibrate([outcome(("ttft", 1.0, None)), outcome()]) == {}


def test_deciles_go_from_the_lowest_prediction_to_the_highest():
    """Reliable predictions have the same mean as what happened in every tenth, not only over all of them."""
    outcomes = [outcome(("ttft", float(number), number / 2)) for number in reversed(range(40))]
    deciles = calibrate(outcomes)["ttft"].deciles
    assert [one.predicted_seconds for one in deciles] == [4 * number + 1.5 for number in range(10)]
    assert [one.actual_seconds for one in deciles] == [2 * number + 0.75 for number in range(10)]
    assert calibrate(outcomes[:9])["ttft"].deciles == []


def test_seeds_are_averaged_term_by_term():
    """Predictions are counted, everything else is a mean; a term that a seed lacks is left out."""
    first = calibrate([outcome(("ttft", 1.0, 2.0), ("end", 1.0, 1.0))])
    second = calibrate([outcome(("ttft", 1.0, 4.0)), outcome(("ttft", 1.0, 4.0))])
    combined = combine_calibrations([first, second])
    assert combined.keys() == {"ttft"}
    assert (combined["ttft"]["mean_error"], combined["ttft"]["num_predictions"]) == (2.0, 3)
    assert combined["ttft"]["deciles"] == []
