"""The effect of int8 weights is measured on a real tokenizer and model, and the figures must be consistent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.int8_products import skip_unless_exact
from tools.bench.engine import int8_quality
from tools.bench.engine.int8_quality import measure_int8_quality


def test_int8_is_close_and_not_the_same(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement that compared a model with itself would find no difference."""
    skip_unless_exact()
    monkeypatch.setattr(int8_quality, "_NUM_WINDOWS", 2)
    monkeypatch.setattr(int8_quality, "_WINDOW_TOKENS", 96)
    monkeypatch.setattr(int8_quality, "_ANSWER_TOKENS", 4)
    quality = measure_int8_quality(model_dir, 1)
    assert quality["num_tokens"] == 2 * 95
    assert 0 < quality["kl_divergence"] < 0.05
    assert quality["top_1_agreement"] > 0.8
    assert abs(quality["perplexity_int8"] / quality["perplexity"] - 1) < 0.05
    pairs = zip(quality["greedy_tokens_agreeing"], quality["greedy_answer_tokens"], strict=True)
    assert all(agreeing <= length for agreeing, length in pairs)
