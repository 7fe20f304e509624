"""The compiled forward pass: where it runs, and that it is the model that torch's operators compute."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_server.engines.torch_engine.model_runner import ModelRunner, ScheduledSequence
from tests.fakes.int8_products import skip_unless_exact
from tests.fakes.kernel_threads import family_params, float32_family_params, runnable_family_names
from tests.fakes.tiny_llama import write_tiny_llama

MODULE = "shard_server.engines.torch_engine.kernels.compiled_forward"
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 333}
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "norms of heads, windows": {**QWEN3, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
}


def load(
    model_dir: Path, num_threads: int = 1, reasons: list[str] | None = None, **options: Any
) -> tuple[ModelRunner, bool]:
    """And whether compiled kernels run."""
    told: list[str] = [] if reasons is None else reasons
    settings = {"dtype": "bfloat16", "block_size": 16, "num_blocks": 64, "max_model_len": 512} | options
    runner = ModelRunner(model_dir, num_threads=num_threads, on_progress=told.append, **settings)
    return runner, "torch" not in runner.variant


def steps(runner: ModelRunner) -> list[torch.Tensor]:
    """Prompts, chunks and decodes; the workspace grows on the way, and is used again by fewer rows."""
    tokens = random.Random(1).choices(range(320), k=300)
    tables = [list(range(20)), list(range(20, 40))]
    logits = [runner.run([ScheduledSequence(tokens[:10], 0, tables[0], True)])]
    logits.append(runner.run([ScheduledSequence(tokens[:200], 0, tables[1], False)]))
    mixed = [ScheduledSequence([7], 10, tables[0], True), ScheduledSequence(tokens[200:], 200, tables[1], True, 2)]
    logits.append(runner.run(mixed))
    logits += [runner.run([ScheduledSequence([5], 11 + i, tables[0], True)]) for i in range(3)]
    return logits


@pytest.mark.parametrize("weights", ["dtype", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", family_params())
def test_it_computes_what_torchs_operators_compute(tmp_path: Path, family: str, shape: str, weights: str):
    """To the precision of bf16, with the same bits on one thread and three."""
    if weights == "int8":
        skip_unless_exact()
    model_dir = write_tiny_llama(tmp_path, head_dim=64, **SHAPES[shape])
    before = torch.get_num_threads()
    try:
        reference, is_compiled = load(model_dir, kernels="torch", weights=weights)
        assert not is_compiled
        runner, is_compiled = load(model_dir, kernels=family, weights=weights)
        assert is_compiled
        assert runner.batch_invariant
        logits = steps(runner)
        for rows, expected in zip(logits, steps(reference), strict=True):
            assert rows.shape == expected.shape
            assert rows.dtype == torch.float32
            if len(rows):
                assert torch.cosine_similarity(rows, expected).min() > 0.998
        threaded, _ = load(model_dir, 3, kernels=family, weights=weights)
        assert all(torch.equal(rows, others) for rows, others in zip(logits, steps(threaded), strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("weights", ["dtype", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("names", float32_family_params())
def test_float32_families_compute_the_same_bits(tmp_path: Path, names: list[str], shape: str, weights: str):
    """So shards on CPUs with AVX-512, with AVX2 and with NEON continue one another's answers exactly."""
    model_dir = write_tiny_llama(tmp_path, head_dim=32, **SHAPES[shape])
    runners = [load(model_dir, kernels=name, weights=weights)[0] for name in names]
    assert len({runner.variant for runner in runners}) == 1
    logits = [steps(runner) for runner in runners]
    assert all(torch.equal(rows, others) for own in logits[1:] for rows, others in zip(logits[0], own, strict=True))


def test_where_it_cannot_run_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In float32, with odd blocks, heads or sizes, without numba: torch computes, slower, and the log says why."""
    model_dir = write_tiny_llama(tmp_path / "wide", head_dim=64)
    assert load(model_dir)[1]
    small_heads = write_tiny_llama(tmp_path / "small heads", head_dim=16)
    odd_sizes = write_tiny_llama(tmp_path / "odd sizes", head_dim=64, intermediate_size=100)
    cases = [
        (model_dir, {"dtype": "float32"}, "bfloat16"),
        (model_dir, {"block_size": 5}, "multiples of 16"),
        (small_heads, {}, "heads of 32"),
        (odd_sizes, {}, "multiples of 32"),
    ]
    for place, options, reason in cases:
        told: list[str] = []
        runner, is_compiled = load(place, 0, told, **options)
        assert not is_compiled
        assert any("left out" in line and reason in line for line in told), told
        assert runner.run([ScheduledSequence([1, 2, 3], 0, [0], True)]).shape == (1, 320)
    monkeypatch.setitem(sys.modules, "shard_server.engines.torch_engine.kernels.thread_pool", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    told = []
    runner, is_compiled = load(model_dir, 0, told, dtype="auto")
    assert not is_compiled
    assert any("left out" in line for line in told)
    assert runner.batch_invariant


def test_heads_of_32_numbers_are_computed_by_every_family(tmp_path: Path):
    """AMX took multiples of 64 only, and encoders have smaller ones."""
    model_dir = write_tiny_llama(tmp_path, head_dim=32)
    names = runnable_family_names()
    for name in {names[0], names[-1]}:
        assert load(model_dir, kernels=name)[1]
