"""Runs the measurements of one engine in this process, and renders the report."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from kvloom.errors import KvloomError
from kvloom_common.config import ShardConfig, TorchConfig
from shard_server.engines.base import Capability, Engine, EngineError
from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.engine import TorchEngine
from shard_server.engines.torch_engine.kernels.reference_decoder import ReferenceDecoder
from tools.bench.engine.quality import measure_quality, quality_table
from tools.bench.engine.roofline import decode_shares, measure_limits, prefill_shares
from tools.bench.engine.techniques import measure_guided, run_speculation
from tools.bench.engine.throughput import (
    DEFAULT_MAX_SECONDS,
    PREFILL_TOKENS,
    DecodeFigure,
    PrefillFigure,
    ThroughputBench,
)

DEFAULT_BATCHES: Final = (1, 8, 32)
_SECTION_ERRORS: Final = (EngineError, KvloomError, ImportError, MemoryError, OSError, RuntimeError, ValueError)
"""Errors of one measurement that must not cost the others."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measurements:
    """Says what to measure beside prefill, decoding, memory and load time."""

    roofline: bool = False
    reference: bool = False
    """The plainest decoder; see reference_decoder.py."""
    speculation: bool = False
    quality: bool = False
    guided: bool = False


def run_bench(
    model_dir: Path,
    batches: Sequence[int] = DEFAULT_BATCHES,
    *,
    torch: TorchConfig | None = None,
    temperature: float = 0.0,
    max_seconds: float = DEFAULT_MAX_SECONDS,
    also: Measurements | None = None,
    on_progress: Callable[[str], None] = lambda _message: None,
) -> dict[str, Any]:
    """Measure a fresh engine in this process, so that the process's memory is part of its own. Returns medians.

    A measurement without a figure has None, and a `note` with the reason. Ctrl-C ends the measurements: the report
    holds what was measured so far. Raises EngineError when the engine cannot be loaded, and KeyboardInterrupt when
    there is no figure yet.
    """
    torch = msgspec.structs.replace(torch or TorchConfig())
    torch.num_threads = torch.num_threads or os.cpu_count() or 1
    also = also or Measurements()
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
        for name, run in _sections(model_dir, torch, max_seconds, also, report, on_progress):
            on_progress(name)
            try:
                run()
            except _SECTION_ERRORS as error:
                report[name] = {"note": f"{type(error).__name__}: {error}"}
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


def _sections(
    model_dir: Path,
    torch: TorchConfig,
    max_seconds: float,
    also: Measurements,
    report: dict[str, Any],
    on_progress: Callable[[str], None],
) -> list[tuple[str, Callable[[], None]]]:
    """(key of the report, what adds it) of the measurements that were asked for."""

    def add(key: str, measure: Callable[[], Any]) -> None:
        report[key] = measure()

    num_threads, dtype = torch.num_threads, torch.dtype
    sections: list[tuple[bool, str, Callable[[], None]]] = [
        (also.reference, "reference", functools.partial(_add_reference, model_dir, num_threads, max_seconds, report)),
        (
            also.speculation,
            "speculation",
            lambda: add("speculation", lambda: run_speculation(model_dir, (1, 8), num_threads, dtype, max_seconds)),
        ),
        (
            also.quality,
            "quality",
            lambda: add(
                "quality",
                lambda: measure_quality(model_dir, num_threads, max_seconds, on_progress, _compared_kernels(torch)),
            ),
        ),
        (also.guided, "guided", lambda: add("guided", lambda: measure_guided(model_dir, DEFAULT_BATCHES))),
        (also.roofline, "roofline", functools.partial(_add_roofline, model_dir, torch, report)),
    ]
    return [(key, run) for is_wanted, key, run in sections if is_wanted]


def _compared_kernels(torch: TorchConfig) -> list[str]:
    """Every family that runs here, or the one that is asked for."""
    if torch.kernels == "auto":
        with contextlib.suppress(ImportError):  # without numba there are none
            from shard_server.engines.torch_engine.kernels.families import runnable_families

            return [family.name for family in runnable_families()]
    return [torch.kernels]


def _add_reference(model_dir: Path, num_threads: int, max_seconds: float, report: dict[str, Any]) -> None:
    reference = ReferenceDecoder(model_dir, num_threads)
    for row in report["decode"]:
        if row["tokens_per_second"]:
            num_prompt_tokens = round(sum(row["prompt_tokens"]) / row["batch"])
            rate = reference.decode_tokens_per_second(row["batch"], num_prompt_tokens, max_seconds)
            row["reference_tokens_per_second"] = round(rate, 1)


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
        if "reference_tokens_per_second" in row:
            lines.append(f"  reference {row['reference_tokens_per_second']:8.1f} tokens/s")
    lines += _section_lines(report)
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


def _section_lines(report: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for name in ("reference", "speculation", "quality", "guided", "roofline"):
        section = report.get(name)
        if section is None:
            continue
        if isinstance(section, dict) and section.get("note"):
            lines.append(f"{name}: no sample: {section['note']}")
        elif name == "roofline":
            source = "multiply-adds" if section["gflop_source"] == "fma" else "torch's matrix products"
            lines.append(
                f"limits of {section['num_threads']} threads: memory is read at {section['gb_per_second']} GB/s, "
                f"float32 computed at {section['gflop_per_second']:.0f} GFLOP/s ({source}; matrix tiles and bf16 "
                f"instructions exceed it)"
            )
        elif name == "quality":
            lines.append(quality_table(section))
        elif name == "speculation":
            lines += [
                f"speculation, {row['text']}, batch {row['batch']}: {row['tokens_per_second']} tokens/s without, "
                f"{row['with_speculation']} with ({row['speed_up']} times), acceptance {row['acceptance']}"
                for row in section
            ]
        elif name == "guided":
            lines += [
                f"guided, batch {row['batch']}, temperature {row['temperature']}: {row['added_us_per_token']} us a "
                f"token (at most {row['added_us_per_token_max']}), compiled in {row['compile_ms']} ms"
                for row in section
            ]
    return lines
