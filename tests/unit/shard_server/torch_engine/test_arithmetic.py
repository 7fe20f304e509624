"""What "auto" means: the fastest that keeps the model as it is, and smaller numbers only where memory is short."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.arithmetic import Arithmetic, ArithmeticChoice, choose_arithmetic
from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.kernels import form_choice
from shard_server.engines.torch_engine.kernels.families import runnable_families
from shard_server.engines.torch_engine.kernels.form_choice import Costs
from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool
from shard_server.engines.torch_engine.weight_form import NOT_PACKED, PackedFiles, WeightForm
from tests.fakes.kernel_threads import kernel_thread_pool
from tests.fakes.tiny_llama import write_tiny_llama

NUM_BYTES = {torch.float32: 4, torch.bfloat16: 2}
"""Of each weight; of int8 weights half as many"""


BF16_IS_FAST = {"packed": (1.0, 0.01), "dtype": (2.0, 0.01), "int8": (1.9, 0.01)}
BF16_IS_SLOW = {"packed": (1.0, 0.01), "dtype": (4.0, 0.01), "int8": (2.0, 0.01)}
PACKED_IS_SLOW = {"packed": (1.0, 3.0), "dtype": (2.0, 0.01), "int8": (1.9, 0.01)}
"""Seconds of a row alone and of one of many, as measure_forms finds them"""


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, BF16_IS_FAST)


def measured(monkeypatch: pytest.MonkeyPatch, costs: Costs) -> None:
    """A machine with these costs."""
    monkeypatch.setattr(form_choice, "_kept_costs", lambda _threads, _measure: costs)


def choose(
    tmp_path: Path, told: list[str], num_bytes: int = 9, packed: PackedFiles = NOT_PACKED, **wanted: str
) -> Arithmetic:
    """With memory for so many bytes for each weight."""
    config = load_config(write_tiny_llama(tmp_path, head_dim=64))

    def check(dtype: torch.dtype, form: WeightForm) -> None:
        if NUM_BYTES[dtype] // (2 if form is WeightForm.INT8 else 1) > num_bytes:
            raise EngineError(f"too little memory for {dtype}")

    return choose_arithmetic(config, ArithmeticChoice(**wanted), 16, check, told.append, packed)


def test_auto_keeps_the_weights_and_compiles(tmp_path: Path):
    """bf16 in memory, whatever the CPU."""
    found = choose(tmp_path, [])
    assert (found.dtype, found.weights) == (torch.bfloat16, WeightForm.DTYPE)
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
    assert found.weights is WeightForm.INT8
    assert any("smaller numbers than preferred: too little memory" in line for line in told)
    with pytest.raises(EngineError, match="too little memory"):
        choose(tmp_path, [], num_bytes=1, weights="dtype")
    with pytest.raises(EngineError, match="too little memory"):
        choose(tmp_path, [], num_bytes=0)


WHOLE = PackedFiles(is_there=True, is_whole=True, num_bytes=1)


@pytest.mark.parametrize(
    ("costs", "packed", "form"),
    [
        (BF16_IS_FAST, WHOLE, WeightForm.PACKED),
        (PACKED_IS_SLOW, WHOLE, WeightForm.DTYPE),
        (BF16_IS_FAST, NOT_PACKED, WeightForm.DTYPE),
        (BF16_IS_SLOW, NOT_PACKED, WeightForm.INT8),
    ],
)
def test_auto_takes_the_fastest_form_that_keeps_quality(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, costs: Costs, packed: PackedFiles, form: WeightForm
):
    """Packed weights lose nothing; int8 ones must be worth their rounding. The log and status say why."""
    measured(monkeypatch, costs)
    told: list[str] = []
    found = choose(tmp_path, told, packed=packed)
    assert found.weights is form
    [line] = [line for line in told if line.startswith("weights: ")]
    assert form.value in line
    assert "measured" in line
    assert ("packed" in line.partition("measured")[2]) == packed.is_there
    assert line.partition(", ")[2] in found.description


def test_packed_weights_compute_the_same_bits_wherever_there_are_no_tiles(tmp_path: Path):
    """So shards of different CPUs are one variant, unless a part of the weights is not packed."""
    fastest, *_, slowest = (family.name for family in runnable_families() if family.name != "amx")
    names = fastest, slowest
    variants = {choose(tmp_path, [], packed=WHOLE, weights="packed", kernels=name).variant for name in names}
    assert len(variants) == 1
    partly = dataclasses.replace(WHOLE, is_whole=False)
    expected = {choose(tmp_path, [], kernels=name).variant.partition("/")[2] for name in names}
    found = {choose(tmp_path, [], packed=partly, weights="packed", kernels=name).variant for name in names}
    assert found == {f"packed/{arithmetic}" for arithmetic in expected}


def test_costs_are_measured_once_and_again_when_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All shards of a machine choose alike, whatever else runs while one starts."""
    monkeypatch.undo()
    with kernel_thread_pool(1) as threads:
        costs = form_choice.measure_forms(threads) or BF16_IS_FAST
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        found: list[Costs] = []

        def measure(_threads: ThreadPool) -> Costs:
            found.append(costs)
            return costs

        def choice() -> form_choice.MeasuredForm:
            return form_choice.fastest_form(threads, may_be_packed=True, on_progress=str, measure=measure)

        first = choice()
        assert choice() == first
        assert len(found) == 1
        assert all(0 < seconds < 60 for cost in found[0].values() for seconds in cost)
        [path] = (tmp_path / "kvloom").glob("forms-*.json")
        for content in ("", "[]", '{"packed": 1}'):
            path.write_text(content)
            choice()
        assert len(found) == 4


def test_what_a_busy_machine_shows_decides_nothing_and_is_soon_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise one start beside other work would give a machine coarser weights for good. Shards that start together
    still choose alike."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    costs: list[Costs] = [{}, BF16_IS_SLOW]
    with kernel_thread_pool(1) as threads:

        def choice() -> form_choice.MeasuredForm:
            return form_choice.fastest_form(
                threads, may_be_packed=False, on_progress=str, measure=lambda _threads: costs.pop(0)
            )

        assert choice().form is WeightForm.DTYPE
        assert "busy" in choice().reason
        [path] = (tmp_path / "kvloom").glob("forms-*.json")
        os.utime(path, (0, 0))
        assert choice().form is WeightForm.INT8
        assert choice().form is WeightForm.INT8
        assert not costs


@pytest.mark.parametrize(("slow_from", "settles"), [(0, False), (1, False), (4, True)])
def test_costs_count_when_the_two_fastest_runs_agree(slow_from: int, settles: bool):
    """A run that other work slowed down is told by the others; when every run differs, nothing is known."""
    now = 0.0
    runs = 0

    def run() -> tuple[float, float]:
        nonlocal now, runs
        runs += 1
        seconds = 0.1 if runs <= slow_from else 0.1 * 1.2**runs
        now += 0.1
        return seconds, 0.01

    costs = form_choice.settled_costs({"packed": run}, lambda: now)
    assert costs == ({"packed": (0.1, 0.01)} if settles else {})
    assert now < 4


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
