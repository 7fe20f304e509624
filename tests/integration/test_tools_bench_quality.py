"""What number and weight formats change is measured on a real tokenizer and model, and the figures must be
consistent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from shard_server.engines.base import EngineError
from tools.bench.engine import quality
from tools.bench.engine.quality import measure_quality, quality_table


@pytest.fixture(autouse=True)
def _few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "_NUM_WINDOWS", 2)
    monkeypatch.setattr(quality, "_WINDOW_TOKENS", 96)
    monkeypatch.setattr(quality, "_ANSWER_TOKENS", 4)


@pytest.mark.parametrize(
    ("max_seconds", "num_windows"), [(0.0, 1), pytest.param(math.inf, 2, marks=pytest.mark.long)], ids=["some", "all"]
)
def test_formats_are_close_to_float32_and_not_the_same(model_dir: Path, max_seconds: float, num_windows: int) -> None:
    """A measurement that compared a model with itself would find no difference."""
    measured = measure_quality(model_dir, 1, max_seconds)
    assert measured["num_tokens"] == num_windows * 95
    rows = {row["format"]: row for row in measured["formats"]}
    assert set(rows) == {"bfloat16", "int8"}
    for row in rows.values():
        assert 0 < row["kl_divergence"] < 0.05
        assert row["top_1_agreement"] > 0.8
        assert abs(row["perplexity"] / measured["perplexity"] - 1) < 0.05
        pairs = zip(row["greedy_tokens_agreeing"], measured["greedy_answer_tokens"], strict=True)
        assert all(agreeing <= length for agreeing, length in pairs)
    assert "int8      perplexity" in quality_table(measured)


def test_a_format_that_a_machine_cannot_compute_is_named(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others must still be measured; and a slow machine computes fewer texts."""

    def refuse(model_dir: Path, num_threads: int, options: dict[str, Any]) -> Any:
        if options.get("weights") == "int8":
            raise EngineError("this CPU's int8 products overflow")
        return make(model_dir, num_threads, options)

    make = quality._runner
    monkeypatch.setattr(quality, "_runner", refuse)
    measured = measure_quality(model_dir, 1, max_seconds=0.0)
    assert measured["num_tokens"] == 95
    assert len(measured["greedy_answer_tokens"]) == 1
    bfloat16, int8 = measured["formats"]
    assert bfloat16["note"] is None
    assert int8 == {"format": "int8", "note": "this CPU's int8 products overflow"}
    assert "int8      no sample: this CPU's int8 products overflow" in quality_table(measured)
