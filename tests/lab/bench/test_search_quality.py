"""`kvloom-lab bench search-quality` ranks with a store's own index, and counts as others do."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from lab.bench.search_quality import figures, run_bench

PAIRS = {
    "How is the loom oiled?": "The loom is oiled twice a day. " * 8,
    "Who grinds wheat?": "A miller grinds wheat. " * 8,
    "Which card is read first?": "Cards are read one by one, and the first is on top. " * 8,
}


class WordEncoder:
    """Texts with the same words have near vectors."""

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        found = np.zeros((len(texts), 64), np.float32)
        for row, text in zip(found, texts, strict=True):
            for word in text.lower().split():
                row[hashlib.sha256(word.encode()).digest()[0] % 64] += 1
        return found


def test_the_report_is_whole() -> None:
    """Every figure of docs/notes/performance/file-search.md comes from this object."""
    report = run_bench(PAIRS, WordEncoder())
    assert (report["num_questions"], report["num_chunks"] >= 3) == (3, True)
    assert [row["what"] for row in report["rankings"]] == ["words alone (BM25)", "vectors alone", "both"]
    assert all(row["recall_at_10"] == 1 for row in report["rankings"])


def test_figures_are_those_of_the_definitions() -> None:
    """One document is right: it is found at its place, or not among the first."""
    found = figures([0, 1, 4, 9, 10, 64])
    assert (found["recall_at_1"], found["recall_at_5"], found["recall_at_10"]) == (0.167, 0.5, 0.667)
    gain = 1 + 1 / math.log2(3) + 1 / math.log2(6) + 1 / math.log2(11)
    assert found["ndcg_at_10"] == round(gain / 6, 3)
