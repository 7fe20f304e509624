"""What number and weight formats change is measured on a real tokenizer and model, and the figures must be
consistent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lab.bench import weight_quality as quality
from lab.bench.weight_quality import measure_quality, quality_table
from lab.shallow_model import write_shallow_model
from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.model_runner import ScheduledSequence


@pytest.fixture(autouse=True)
def _few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "_NUM_WINDOWS", 2)
    monkeypatch.setattr(quality, "_WINDOW_TOKENS", 96)
    monkeypatch.setattr(quality, "_ANSWER_TOKENS", 4)


@pytest.fixture(scope="module")
def shallow_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what does not depend on the number of layers."""
    return write_shallow_model(model_dir, tmp_path_factory.mktemp("shallow") / "model", num_layers=3)


@pytest.mark.parametrize(
    ("model", "max_seconds", "num_windows"),
    [("shallow_dir", 0.0, 1), pytest.param("model_dir", math.inf, 2, marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_formats_are_close_to_float64_and_not_the_same(
    request: pytest.FixtureRequest, model: str, max_seconds: float, num_windows: int
) -> None:
    """A measurement that compared a model with itself would find no difference."""
    measured = measure_quality(request.getfixturevalue(model), 1, max_seconds)
    assert measured["num_tokens"] == num_windows * 95
    rows = {row["format"]: row for row in measured["formats"]}
    assert set(rows) == {"bfloat16", "packed", "int8", "int4"}
    assert rows["packed"]["kl_divergence"] < rows["int8"]["kl_divergence"] / 2
    # This model's weights have 4 bits already, to which rounding to 4 bits leads back.
    assert rows["int4"]["kl_divergence"] < rows["int8"]["kl_divergence"] / 2
    for row in rows.values():
        assert 0 < row["kl_divergence"] < 0.05
        assert row["top_1_agreement"] > 0.8
        assert 0 <= row["largest_gap"] < 1
        assert abs(row["perplexity"] / measured["perplexity"] - 1) < 0.05
        pairs = zip(row["greedy_tokens_agreeing"], measured["greedy_answer_tokens"], strict=True)
        assert all(agreeing <= length for agreeing, length in pairs)
    assert "int8      auto         perplexity" in quality_table(measured)


def test_a_format_that_a_machine_cannot_compute_is_named(shallow_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others must still be measured; and a slow machine computes fewer texts."""

    def refuse(model_dir: Path, num_threads: int, options: dict[str, Any]) -> Any:
        if options.get("weights") == "int8":
            raise EngineError("this CPU's int8 products overflow")
        return make(model_dir, num_threads, options)

    make = quality._runner
    monkeypatch.setattr(quality, "_runner", refuse)
    measured = measure_quality(shallow_dir, 1, max_seconds=0.0)
    assert measured["num_tokens"] == 95
    assert len(measured["greedy_answer_tokens"]) == 1
    bfloat16, _, int8, _ = measured["formats"]
    assert bfloat16["note"] is None
    assert int8 == {"format": "int8", "kernels": "auto", "note": "this CPU's int8 products overflow"}
    assert "int8      auto         no sample: this CPU's int8 products overflow" in quality_table(measured)


def test_the_exact_model_is_the_engine_s_in_float32_to_its_last_digits(shallow_dir: Path, tmp_path: Path) -> None:
    """It has an attention and a cache of its own: a mistake there would be blamed on every family. A second step, which
    attends to cached tokens, included."""
    for file in shallow_dir.iterdir():
        if file.suffix != ".weights":  # the packed ones, which float32 does not compute with
            (tmp_path / file.name).symlink_to(file)
    model_dir = tmp_path
    engine = quality._runner(model_dir, 1, {"dtype": "float32", "kernels": "torch"})
    exact = quality._exact_runner(model_dir, 1)
    tokens, blocks = [7, 300, 5, 11, 90, 2000, 41], [0]
    for first, end in ((0, 5), (5, 7)):
        sequence = ScheduledSequence(tokens[first:end], first, blocks, True, end - first - 1)
        logits = exact.run([sequence])
        assert logits.shape == (end - first, engine.vocab_size)
        assert (engine.run([sequence]) - logits).abs().max() < 1e-3 * logits.abs().max()
