"""One ranking from several, by reciprocal ranks (Cormack, Clarke and Büttcher, 2009): how far up something stands in
each ranking counts, and not its scores, which no two methods have on one scale."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

RANK_CONSTANT: Final = 60
"""That of the paper: the difference between the first places of a ranking counts little more than that between
others."""


class WeightedRanking(NamedTuple):
    """Numbers, the best first, and how much the ranking counts."""

    numbers: Sequence[int]
    weight: float = 1.0


def fused(rankings: Iterable[WeightedRanking]) -> list[tuple[int, float]]:
    """(number, score), the best first. A score of 1 has what is the first of all rankings. Ties have the order of their
    numbers."""
    used = [ranking for ranking in rankings if ranking.weight > 0]
    scores: dict[int, float] = collections.defaultdict(float)
    for ranking in used:
        for rank, number in enumerate(ranking.numbers, 1):
            scores[number] += ranking.weight / (RANK_CONSTANT + rank)
    most = sum(ranking.weight for ranking in used) / (RANK_CONSTANT + 1)
    return sorted(((number, score / most) for number, score in scores.items()), key=lambda one: (-one[1], one[0]))
