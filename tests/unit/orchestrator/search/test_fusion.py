"""Rankings are joined by their ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.search.fusion import WeightedRanking, fused

RANKINGS = st.lists(
    st.builds(WeightedRanking, st.lists(st.integers(0, 20), unique=True), st.floats(0.0, 10.0)), min_size=1, max_size=4
)


@given(RANKINGS)
def test_scores_are_between_0_and_1_and_sorted(rankings: list[WeightedRanking]) -> None:
    """A threshold can only mean something on a fixed scale."""
    found = fused(rankings)
    assert {number for number, _ in found} == {
        number for ranking in rankings if ranking.weight > 0 for number in ranking.numbers
    }
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score <= 1 + 1e-9 for score in scores)


@given(st.lists(st.integers(), unique=True, min_size=1))
def test_what_all_rankings_agree_on_stays(numbers: list[int]) -> None:
    found = fused([WeightedRanking(numbers), WeightedRanking(numbers, 0.5)])
    assert [number for number, _ in found] == numbers
    assert abs(found[0][1] - 1.0) < 1e-9


def test_weights_decide_between_rankings_that_differ() -> None:
    """`hybrid_search` says how much words count against vectors; a weight of 0 leaves a ranking out."""
    by_vector, by_words = [1, 2], [3, 1]
    assert [number for number, _ in fused([WeightedRanking(by_vector), WeightedRanking(by_words)])] == [1, 3, 2]
    assert fused([WeightedRanking(by_vector, 0.0), WeightedRanking(by_words, 1.0)])[0][0] == 3
    assert fused([WeightedRanking(by_vector, 0.1), WeightedRanking(by_words, 9.0)])[0][0] == 3
