"""The AUC and its confidence interval."""

from __future__ import annotations

import random

import pytest

from lab.bench.auc import auc


def test_the_auc_counts_pairs() -> None:
    """It is the share of pairs in which the positive one is larger, and ties count half."""
    positives, negatives = [3.0, 2.0, 5.0], [1.0, 2.0, 4.0, 4.0]
    pairs = [(one > other) + 0.5 * (one == other) for one in positives for other in negatives]
    assert auc(positives, negatives).value == pytest.approx(sum(pairs) / len(pairs))
    assert auc([2.0, 3.0], [0.0, 1.0]) == (1.0, 1.0, 1.0)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """A verdict rests on it. Samples of one distribution have the AUC 0.5."""
    rng = random.Random(4)
    num_within = 0
    for _ in range(400):
        found = auc([rng.random() for _ in range(60)], [rng.random() for _ in range(80)])
        num_within += found.low <= 0.5 <= found.high
    assert 0.92 <= num_within / 400 <= 0.98
