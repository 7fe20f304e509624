"""`kvloom-lab bench vector-search` fills a real index and measures every kind of search once."""

from __future__ import annotations

from lab.bench.vector_search import run_bench


def test_the_report_is_whole() -> None:
    """Every figure of docs/notes/performance/file-search.md comes from this object."""
    report = run_bench(150, 16)
    assert (report["num_chunks"], report["num_dimensions"]) == (150, 16)
    assert report["cut_mb_per_second"] > 0
    assert [row["what"] for row in report["searches"]] == ["by vectors", "in half of it", "by words"]
    assert all(row["p99_ms"] >= row["p50_ms"] > 0 for row in report["searches"])
