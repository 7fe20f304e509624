"""`kvloom-lab bench phrases` loads real policies and screens real answers."""

from __future__ import annotations

from lab.bench.phrases import CASES, run_bench


def test_the_report_is_whole() -> None:
    """Every figure of docs/notes/performance/phrases.md comes from these rows. No list withholds nothing."""
    none, *rows = run_bench([30], num_tokens=300, text_chars=5000, num_words=300)
    assert (none["sent"], none["withheld_chars"], none["halted"]) == (0, 0, 0)
    assert [(row["size"], row["list"]) for row in rows] == [(30, case) for case in CASES]
    assert all(row["mb_s"] > 0 and row["us_token"] > 0 and 0 <= row["sent"] <= 1 for row in rows)
