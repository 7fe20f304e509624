"""Chooses the form of weights that a shard computes with: measured once per machine and kernel family, and kept, so
that all shards choose alike. What a busy machine shows is kept for minutes only, and decides nothing."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch

from kvloom_common.private_file import write_private_file
from shard_server.engines.torch_engine.checkpoint.converted_model import locked
from shard_server.engines.torch_engine.checkpoint.weights import OnProgress
from shard_server.engines.torch_engine.grouped_weight import quantised
from shard_server.engines.torch_engine.kernels.choice import (
    ANSWER_ROWS,
    KEPT_DOUBT_SECONDS,
    PROMPT_ROWS,
    machine_digest,
)
from shard_server.engines.torch_engine.kernels.packed_groups import PackedGroups
from shard_server.engines.torch_engine.kernels.packed_linear import multiply
from shard_server.engines.torch_engine.kernels.packed_weights import PackedBf16, PackedInt8, PackedWeights
from shard_server.engines.torch_engine.kernels.products.outputs import ROUNDED
from shard_server.engines.torch_engine.kernels.program import cache_dir
from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool
from shard_server.engines.torch_engine.weight_form import WeightForm

_DEPTH: Final = 1024
_COLUMNS: Final = 8192
"""8 million weights: of 16 MiB in bf16"""
_FLUSHED_BYTES: Final = 64 * 2**20
"""So much other memory is written before a row is timed, so that weights come from memory, as in a model."""
_MANY_ROWS: Final = 48
_MIN_RUNS: Final = 4
_MAX_SECONDS: Final = 3.0
"""For all runs of all forms"""
_SPREAD: Final = 1.15
"""The two fastest runs of a form may differ by this factor. If they differ by more, other work may have taken a core
from all of them, and the forms cannot be compared."""
_GAIN: Final = 1.3
"""A form must be this many times as fast as the one that is nearer to the file, or smaller, to be taken instead: bf16
or int8 instead of packed weights, int8 instead of bf16. Less may be what else the machine did while they were timed."""

Costs = Mapping[str, tuple[float, float]]
"""By form: the seconds of a row alone, and of each of many rows. Empty where the machine was too busy to tell."""
_BUSY: Final = "the machine was too busy to measure the others"


class MeasuredForm(NamedTuple):
    form: WeightForm
    reason: str
    """For people"""


def fastest_form(
    threads: ThreadPool,
    *,
    may_be_packed: bool,
    on_progress: OnProgress,
    measure: Callable[[ThreadPool], Costs] | None = None,
) -> MeasuredForm:
    """The fastest form that keeps quality: packed weights are those of the file, bf16 ones nearly so, and int8 ones
    must be worth their rounding. `on_progress` is called with the reason."""
    measured = choose_form(_kept_costs(threads, measure or measure_forms), may_be_packed=may_be_packed)
    on_progress(f"weights: {measured.form.value}, {measured.reason}")
    return measured


def choose_form(costs: Costs, *, may_be_packed: bool) -> MeasuredForm:
    """Compare the products of one request: PROMPT_ROWS together, ANSWER_ROWS one by one. Without costs the form is the
    one nearest to the file."""
    if not costs:
        return MeasuredForm(WeightForm.PACKED if may_be_packed else WeightForm.DTYPE, _BUSY)
    total = {form: ANSWER_ROWS * one + PROMPT_ROWS * many for form, (one, many) in costs.items()}
    bf16, int8 = total[WeightForm.DTYPE.value], total[WeightForm.INT8.value]
    form = WeightForm.INT8 if bf16 > _GAIN * int8 else WeightForm.DTYPE
    if may_be_packed and total[WeightForm.PACKED.value] <= _GAIN * total[form.value]:
        form = WeightForm.PACKED
    names = [name for name in costs if may_be_packed or name != WeightForm.PACKED.value]
    times = ", ".join(f"{'bf16' if name == 'dtype' else name} {costs[name][0] * 1e3:.2f}" for name in names)
    return MeasuredForm(form, f"measured, ms for a row and 8 million weights: {times}")


def fastest_form_for_prompts(
    threads: ThreadPool, on_progress: OnProgress, measure: Callable[[ThreadPool], Costs] | None = None
) -> MeasuredForm:
    """The faster form of a model that computes many rows at a time and never one by one, as encoders do: bf16 weights,
    or packed ones, which hardly differ in speed between 4 and 8 bits."""
    costs = _kept_costs(threads, measure or measure_forms)
    form, reason = WeightForm.DTYPE, _BUSY
    if costs:
        bf16, packed = costs[WeightForm.DTYPE.value][1], costs[WeightForm.PACKED.value][1]
        form = WeightForm.PACKED if bf16 > _GAIN * packed else WeightForm.DTYPE
        times = f"packed {packed * 1e3:.2f}, bf16 {bf16 * 1e3:.2f}"
        reason = f"measured, ms for a row of many and 8 million weights: {times}"
    on_progress(f"weights: {form.value}, {reason}")
    return MeasuredForm(form, reason)


def measure_forms(threads: ThreadPool) -> Costs:
    """Time the products of this machine's family, until the two fastest runs of each form agree. Returns nothing when
    they do not after some seconds."""
    weight = torch.randn(_COLUMNS, _DEPTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    makers: dict[WeightForm, Callable[[], PackedWeights]] = {
        WeightForm.PACKED: lambda: PackedGroups(quantised(weight, 4), None, threads),
        WeightForm.DTYPE: lambda: PackedBf16(weight, None, threads),
        WeightForm.INT8: lambda: PackedInt8(weight, None, threads),
    }
    forms = {form.value: make() for form, make in makers.items()}
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8)

    def run(packed: PackedWeights) -> tuple[float, float]:
        flushed.add_(1)
        return _seconds(threads, packed, 1), _seconds(threads, packed, _MANY_ROWS) / _MANY_ROWS

    return settled_costs({name: functools.partial(run, packed) for name, packed in forms.items()}, time.perf_counter)


def settled_costs(forms: Mapping[str, Callable[[], tuple[float, float]]], clock: Callable[[], float]) -> Costs:
    """Call each of `forms` again and again, in turn, so that what else the machine does meets all of them. Each returns
    the seconds of a run with one row, and with many. Returns the least of each, or nothing if the two least still
    differ by _SPREAD after _MAX_SECONDS."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    deadline = clock() + _MAX_SECONDS
    while True:
        for name, run in forms.items():
            runs[name].append(run())
        best = {name: [sorted(seconds)[:2] for seconds in zip(*found, strict=True)] for name, found in runs.items()}
        is_settled = all(len(two) == 2 and two[1] <= _SPREAD * two[0] for pair in best.values() for two in pair)
        if is_settled and all(len(found) >= _MIN_RUNS for found in runs.values()):
            return {name: (one[0], many[0]) for name, (one, many) in best.items()}
        if clock() >= deadline:
            return {}


def _seconds(threads: ThreadPool, packed: PackedWeights, num_rows: int) -> float:
    x = torch.ones(num_rows, _DEPTH, dtype=torch.bfloat16)
    out = torch.empty(num_rows, packed.num_columns, dtype=torch.bfloat16)
    begin = time.perf_counter()
    multiply(threads, packed, x, ROUNDED, out)
    return time.perf_counter() - begin


def _kept_costs(threads: ThreadPool, measure: Callable[[ThreadPool], Costs]) -> Costs:
    """When several shards start together, one measures and the others wait for what it found."""
    path = cache_dir() / f"forms-{threads.family.name}-{threads.num_threads}-{machine_digest()}.json"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # nowhere to keep it: every start measures
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path.with_suffix(".lock")))
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            kept = json.loads(path.read_bytes())
            if kept == {} and abs(time.time() - path.stat().st_mtime) < KEPT_DOUBT_SECONDS:
                return {}
            return {form: (float(kept[form][0]), float(kept[form][1])) for form in _FORMS}
        costs = measure(threads)
        with contextlib.suppress(OSError):
            write_private_file(path, json.dumps(costs).encode())
        return costs


_FORMS: Final = tuple(form.value for form in (WeightForm.PACKED, WeightForm.DTYPE, WeightForm.INT8))
