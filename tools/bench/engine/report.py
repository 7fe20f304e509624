"""Runs the measurements of one engine in this process, and renders the report."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from kvloom_common.config import ShardConfig, TorchConfig
from shard_server.engines.base import Capability, Engine, EngineError
from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.engine import TorchEngine
from tools.bench.engine.roofline import decode_shares, measure_limits, prefill_shares
from tools.bench.engine.throughput import (
    DEFAULT_MAX_SECONDS,
    PREFILL_TOKENS,
    DecodeFigure,
    PrefillFigure,
    ThroughputBench,
)

DEFAULT_BATCHES: Final = (1, 8, 32)
_ROOFLINE_ERRORS: Final = (EngineError, ImportError, MemoryError, OSError, RuntimeError, ValueError)
"""Errors of the roofline that must not cost the figures."""


def run_bench(
    model_dir: Path,
    batches: Sequence[int] = DEFAULT_BATCHES,
    *,
    torch: TorchConfig | None = None,
    temperature: float = 0.0,
    max_seconds: float = DEFAULT_MAX_SECONDS,
    with_roofline: bool = False,
    on_progress: Callable[[str], None] = lambda _message: None,
) -> dict[str, Any]:
    """Measure a fresh engine in this process, so that the process's memory is part of its own. Returns medians.

    A measurement without a figure has None, and a `note` with the reason. Ctrl-C ends the measurements: the report
    holds what was measured so far. Raises EngineError when the engine cannot be loaded, and KeyboardInterrupt when
    there is no figure yet.
    """
    torch = msgspec.structs.replace(torch or TorchConfig())
    torch.num_threads = torch.num_threads or os.cpu_count() or 1
    config = ShardConfig(torch=torch, max_batch=max(batches), max_prefill_tokens_per_step=PREFILL_TOKENS)
    report: dict[str, Any] = {
        "model": model_dir.name,
        "dtype": torch.dtype,
        "weights": torch.weights,
        "num_threads": torch.num_threads,
        "temperature": temperature,
        "note": None,
    }
    engine = TorchEngine(model_dir, model_dir.name, config, on_load_progress=on_progress)
    try:
        asyncio.run(measure_throughput(engine, batches, report, temperature, max_seconds, on_progress))
        report["rss_gib"] = _rss_gib()
        if with_roofline:
            on_progress("roofline")
            try:
                _add_roofline(model_dir, torch, report)
            except _ROOFLINE_ERRORS as error:
                report["roofline"] = {"note": f"{type(error).__name__}: {error}"}
    except KeyboardInterrupt:
        if "prefill" not in report:
            raise
        report["note"] = "interrupted: these are the figures so far"
    return report


async def measure_throughput(
    engine: Engine,
    batches: Sequence[int],
    report: dict[str, Any],
    temperature: float = 0.0,
    max_seconds: float = DEFAULT_MAX_SECONDS,
    on_progress: Callable[[str], None] = lambda _message: None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Start the engine, add the figures to the report one by one, and close it. If the engine dies, the figures that
    are left have its last message as their note. Raises EngineError when it does not start."""
    begin = clock()
    try:
        await engine.start()
        report["load_seconds"] = round(clock() - begin, 2)
        report["loaded_rss_gib"] = _rss_gib()
        report["engine"], report["variant"] = engine.info.description, engine.info.variant
        report["batch_invariant"] = Capability.BATCH_INVARIANT in engine.info.capabilities
        bench = ThroughputBench(engine, temperature=temperature, max_seconds=max_seconds, clock=clock)
        failure: str | None = None
        on_progress("prefill")
        try:
            prefill = await bench.prefill()
        except EngineError as error:
            failure = str(error)
            prefill = PrefillFigure(PREFILL_TOKENS, note=failure)
        report["prefill"] = _row(prefill)
        report["decode"] = []
        for batch in batches:
            on_progress(f"decode, batch {batch}")
            figure = DecodeFigure(batch, note=failure)
            if failure is None:
                try:
                    figure = await bench.decode(batch)
                except EngineError as error:
                    failure = figure.note = str(error)
            report["decode"].append(_row(figure))
    finally:
        await engine.close()


def _rss_gib() -> float:
    return round(psutil.Process().memory_info().rss / 2**30, 2)


def _row(figure: PrefillFigure | DecodeFigure) -> dict[str, Any]:
    row = msgspec.structs.asdict(figure)
    for key, num_digits in (("tokens_per_second", 1), ("step_ms", 3)):
        if row.get(key) is not None:
            row[key] = round(row[key], num_digits)
    return row


def _add_roofline(model_dir: Path, torch: TorchConfig, report: dict[str, Any]) -> None:
    """Add the machine's limits, and to every figure its share of them."""
    if torch.device != "cpu":
        raise EngineError("it measures the limits of a CPU; --shape compares a GPU with its own")
    limits = measure_limits(torch.num_threads)
    config = load_config(model_dir)
    report["roofline"] = {
        "num_threads": limits.num_threads,
        "gb_per_second": round(limits.gb_per_second, 1),
        "gflop_per_second": round(limits.gflop_per_second, 1),
        "gflop_source": limits.gflop_source,
        "note": None,
    }
    prefill = report["prefill"]
    if prefill["tokens_per_second"]:
        num_tokens = prefill["prompt_tokens"]
        prefill |= prefill_shares(limits, config, num_tokens, num_tokens / prefill["tokens_per_second"])
    weight_format = report["variant"].partition("/")[0]
    kv_format = "float32" if weight_format == "float32" or torch.dtype == "float32" else "bfloat16"
    for row in report["decode"]:
        if row["step_ms"]:
            step_seconds = row["step_ms"] / 1e3
            row |= decode_shares(limits, config, row["context_tokens"], step_seconds, kv_format, weight_format)


def report_text(report: dict[str, Any]) -> str:
    """Render what `run_bench` returned."""
    invariance = "batch-invariant" if report["batch_invariant"] else "not batch-invariant"
    lines = [f"{report['model']}, {invariance}: {report['engine']}"]
    lines.append(f"load     {report['load_seconds']:8.2f} s")
    if "rss_gib" in report:
        lines.append(f"RSS      {report['rss_gib']:8.2f} GiB  ({report['loaded_rss_gib']} before the first request)")
    prefill = report["prefill"]
    lines.append(_figure_line("prefill", prefill, f"{prefill['prompt_tokens']}-token prompt"))
    for row in report.get("decode", ()):
        lengths = row["prompt_tokens"] or [0]
        conditions = f"batch {row['batch']}, {row['step_ms'] or math.nan:.1f} ms a step, prompts of {min(lengths)} to "
        conditions += f"{max(lengths)} tokens"
        lines.append(_figure_line("decode", row, conditions if row["step_ms"] else f"batch {row['batch']}"))
    if roofline := report.get("roofline"):
        lines.append(_roofline_line(roofline))
    if report["note"]:
        lines.append(report["note"])
    return "\n".join(lines)


def _figure_line(what: str, row: dict[str, Any], conditions: str) -> str:
    if row["tokens_per_second"] is None:
        return f"{what:8} no sample ({conditions}): {row['note']}"
    line = f"{what:8} {row['tokens_per_second']:8.1f} tokens/s  ({conditions})"
    if row["note"]:
        line += f"\n  {row['note']}"
    if "of_float32_peak" in row:
        bandwidth = ""
        if "of_bandwidth" in row:
            bandwidth = f"{row['gb_per_second']:.1f} GB/s, {row['of_bandwidth']:.0%} of the memory bandwidth; "
        line += (
            f"\n  {bandwidth}{row['gflop_per_second']:.0f} GFLOP/s, {row['of_float32_peak']:.0%} of the float32 peak"
        )
    return line


def _roofline_line(roofline: dict[str, Any]) -> str:
    if roofline["note"]:
        return f"roofline: no sample: {roofline['note']}"
    source = "multiply-adds" if roofline["gflop_source"] == "fma" else "torch's matrix products"
    return (
        f"limits of {roofline['num_threads']} threads: memory is read at {roofline['gb_per_second']} GB/s, "
        f"float32 computed at {roofline['gflop_per_second']:.0f} GFLOP/s ({source}; matrix tiles and bf16 "
        f"instructions exceed it)"
    )
