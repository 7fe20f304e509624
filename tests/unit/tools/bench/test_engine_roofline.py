"""Bytes and operations of a model, counted by hand; and the shares of a machine's limits."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from shard_server.engines.torch_engine.config import LlamaConfig, load_config
from tests.fakes.tiny_llama import write_tiny_llama
from tools.bench.engine import roofline
from tools.bench.engine.model_costs import (
    BYTES_PER_WEIGHT,
    decode_step_bytes,
    decode_step_operations,
    num_head_weights,
    num_layer_weights,
    prefill_operations,
)
from tools.bench.engine.roofline import (
    MachineLimits,
    array_bytes,
    decode_shares,
    last_level_cache_bytes,
    prefill_shares,
)

# The tiny model: hidden 64, inner 128, 4 heads and 2 KV heads of 32, 2 layers, 320 tokens in its vocabulary.
QUERY, KV = 4 * 32, 2 * 32
LAYERS = 2 * (64 * QUERY + 2 * 64 * KV + QUERY * 64 + 3 * 64 * 128)
HEAD = 320 * 64


@pytest.fixture
def config(tmp_path: Path) -> LlamaConfig:
    return load_config(write_tiny_llama(tmp_path))


def test_weights_are_counted_without_norms_and_the_head_only_once(config: LlamaConfig, tmp_path: Path) -> None:
    """A tied head is read as often as one of its own; an embedding is looked up, not read."""
    assert num_layer_weights(config) == LAYERS
    assert num_head_weights(config) == HEAD
    untied = load_config(write_tiny_llama(tmp_path / "untied", tie_word_embeddings=False))
    assert num_layer_weights(untied) == LAYERS
    assert num_head_weights(untied) == HEAD


@pytest.mark.parametrize(("weight_format", "num_bytes"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_a_decoding_step_reads_all_weights_once_and_the_kv_of_each_sequence(
    config: LlamaConfig, weight_format: str, num_bytes: int
) -> None:
    """Keys and values are in the format of the rest, not in that of the weights."""
    expected = num_bytes * (LAYERS + HEAD) + 2 * 2 * 2 * KV * (100 + 30)
    assert decode_step_bytes(config, [100, 30], BYTES_PER_WEIGHT[weight_format], 2) == expected


def test_operations_are_two_per_weight_and_four_per_number_of_attention(config: LlamaConfig) -> None:
    """A multiplication and an addition; for scores and for sums of values."""
    assert decode_step_operations(config, [100, 30]) == 2 * 2 * (LAYERS + HEAD) + 2 * 4 * QUERY * (100 + 30)
    pairs = 1 + 2 + 3
    assert prefill_operations(config, 3) == 2 * (3 * LAYERS + HEAD) + 2 * 4 * QUERY * pairs
    assert prefill_operations(config, 3, num_logit_rows=3) == 2 * 3 * (LAYERS + HEAD) + 2 * 4 * QUERY * pairs


def test_windows_hide_keys(config: LlamaConfig) -> None:
    """What no token sees is neither read nor multiplied."""
    windowed = dataclasses.replace(config, layer_windows=(None, 2))
    assert decode_step_bytes(windowed, [100], 2, 2) == 2 * (LAYERS + HEAD) + 2 * 2 * KV * (100 + 2)
    assert prefill_operations(windowed, 4) == 2 * (4 * LAYERS + HEAD) + 4 * QUERY * ((1 + 2 + 3 + 4) + (1 + 2 + 2 + 2))


def test_shares_are_rates_over_limits(config: LlamaConfig) -> None:
    """A step that reads what the memory delivers in its time has a share of 1."""
    limits = MachineLimits(1, gb_per_second=10.0, gflop_per_second=100.0, gflop_source="fma")
    num_bytes = decode_step_bytes(config, [100], 1.0, 2)
    shares = decode_shares(limits, config, [100], num_bytes / 10e9, "bfloat16", "int8")
    assert shares["of_bandwidth"] == pytest.approx(1.0)
    assert shares["gb_per_second"] == pytest.approx(10.0)
    shares = prefill_shares(limits, config, 512, prefill_operations(config, 512) / 250e9)
    assert shares == {"gflop_per_second": 250.0, "of_float32_peak": 2.5}
    assert "of_bandwidth" not in decode_shares(limits, config, [100], 1.0, "bfloat16", "unknown")


def test_the_array_is_larger_than_any_cache_and_leaves_memory_free(tmp_path: Path) -> None:
    """A virtual machine may report its host's cache."""
    gib = 2**30
    assert array_bytes(32 * 2**20, 64 * gib) == gib
    assert array_bytes(768 * 2**20, 64 * gib) == 1.5 * gib
    assert array_bytes(480 * 2**20, 2 * gib) == gib // 2
    for cpu, (level, size, shared) in enumerate(
        [(3, "32M", "0-1"), (3, "32M", "0-1"), (3, "16384K", "2"), (2, "9M", "0")]
    ):
        folder = tmp_path / f"cpu{cpu}" / "cache" / "index3"
        folder.mkdir(parents=True)
        for name, content in (("level", level), ("size", size), ("shared_cpu_list", shared)):
            (folder / name).write_text(f"{content}\n")
    assert last_level_cache_bytes(tmp_path) == 48 * 2**20
    assert last_level_cache_bytes(tmp_path / "nothing") == 0


@pytest.mark.parametrize("has_compiler", [True, False])
def test_limits_are_measured(monkeypatch: pytest.MonkeyPatch, has_compiler: bool) -> None:
    """With a compiled loop where there is a compiler, and torch's products where there is none."""
    monkeypatch.setattr(roofline, "array_bytes", lambda cache_bytes, free_bytes: 2**22)
    monkeypatch.setattr(roofline, "_FMA_PASS_SECONDS", 0.001)
    monkeypatch.setattr(roofline, "_MATMUL_SIZES", (64,))
    if not has_compiler:
        monkeypatch.setitem(sys.modules, "tools.bench.engine.roofline_kernels", None)
    limits = roofline.measure_limits(1)
    assert limits.gb_per_second > 0
    assert limits.gflop_per_second > 0
    if not has_compiler:
        assert limits.gflop_source == "matmul"
