"""What "auto" means: the fastest that keeps the model as it is, and smaller numbers only where memory is short."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.arithmetic import Arithmetic, ArithmeticChoice, choose_arithmetic
from shard_server.engines.torch_engine.config import load_config
from tests.fakes.tiny_llama import write_tiny_llama

NUM_BYTES = {torch.float32: 4, torch.bfloat16: 2}
"""Of each weight; of int8 weights half as many"""


def choose(tmp_path: Path, told: list[str], num_bytes: int = 9, **wanted: str) -> Arithmetic:
    """With memory for so many bytes for each weight."""
    config = load_config(write_tiny_llama(tmp_path, head_dim=64))

    def check(dtype: torch.dtype, int8_weights: bool) -> None:
        if NUM_BYTES[dtype] // (2 if int8_weights else 1) > num_bytes:
            raise EngineError(f"too little memory for {dtype}")

    return choose_arithmetic(config, ArithmeticChoice(**wanted), 16, check, told.append)


def test_auto_keeps_the_weights_and_compiles(tmp_path: Path):
    """bf16 in memory, whatever the CPU."""
    found = choose(tmp_path, [])
    assert (found.dtype, found.int8_weights) == (torch.bfloat16, False)
    assert "torch" not in found.variant
    assert "bf16 weights" in found.description


def test_what_is_asked_for_is_done(tmp_path: Path):
    """Variants tell float32, int8 and bf16 apart, and kernels."""
    wanted = [
        {"weights": "int8"},
        {"dtype": "float32"},
        {"kernels": "torch", "dtype": "bfloat16"},
        {"kernels": "generic"},
    ]
    found = [choose(tmp_path, [], **one) for one in wanted]
    assert len({one.variant for one in found}) == 4
    assert [one.variant.split("/")[0] for one in found] == ["int8", "float32", "bfloat16", "bfloat16"]
    assert [one.kernels.arithmetic.startswith("torch") for one in found] == [False, True, True, False]


def test_weights_are_int8_only_where_memory_is_short(tmp_path: Path):
    """The log then says why the answers are a little coarser."""
    told: list[str] = []
    found = choose(tmp_path, told, num_bytes=1)
    assert found.int8_weights
    assert any("smaller numbers than preferred: too little memory" in line for line in told)
    with pytest.raises(EngineError, match="too little memory"):
        choose(tmp_path, [], num_bytes=1, weights="dtype")
    with pytest.raises(EngineError, match="too little memory"):
        choose(tmp_path, [], num_bytes=0)


def test_without_numba_torchs_operators_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In float32, which they are fast in on every CPU, unless it multiplies bf16."""
    module = "shard_server.engines.torch_engine.kernels.compiled_forward"
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    told: list[str] = []
    assert choose(tmp_path, told).dtype == torch.float32
    assert any("left out" in line for line in told)
    assert choose(tmp_path, [], num_bytes=2).dtype == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert choose(tmp_path, []).dtype == torch.bfloat16
