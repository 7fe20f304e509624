"""`kvloom bench engine`: the speed of the embedded engine on this machine, without the fabric around it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import click
import psutil

from kvloom.config import ShardConfig, TorchConfig
from shard_server.engines.base import EngineError, EngineRequest, Sampling, StepOutput
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME
from shard_server.engines.torch_engine.engine import TorchEngine
from shard_server.engines.torch_engine.kernels.reference_decoder import ReferenceDecoder
from tools.bench.engine.device import SHAPES, device_table, run_device_bench
from tools.bench.engine.int8_quality import measure_int8_quality
from tools.bench.engine.techniques import measure_guided, run_speculation
from tools.bench.engine.versus import CHOICES, compare, comparison_table, plan_entrants
from tools.failures import CommandError
from tools.models.registry import ModelRegistry
from tools.models.resolve import resolve_model
from tools.options import DEFAULT_DATA_DIR, data_dir_option, option

DEFAULT_BATCHES: Final = (1, 8, 32)
_PREFILL_TOKENS: Final = 512
_PREFILL_RUNS: Final = 5
_DECODE_STEPS: Final = 48
_PROMPT_TOKENS: Final = (32, 256)
"""Shortest and longest prompt of a decoding batch; the others are spread evenly between them."""


def run_bench(
    model_dir: Path,
    batches: Sequence[int] = DEFAULT_BATCHES,
    *,
    num_threads: int = 0,
    dtype: str = "bfloat16",
    deterministic: bool = True,
    weights: Literal["dtype", "int8"] = "dtype",
    with_reference: bool = False,
    temperature: float = 0.0,
    device: Literal["cpu", "cuda"] = "cpu",
) -> dict[str, Any]:
    """Measure a fresh engine in this process, so that the process's memory is part of its own. Returns medians. Raises
    EngineError.

    `num_threads` 0 means one per core. `with_reference` also measures the plainest decoder (see reference_decoder.py).
    """
    num_threads = num_threads or os.cpu_count() or 1
    torch_config = TorchConfig(
        device=device,
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        num_threads=num_threads,
        deterministic=deterministic,
        weights=weights,
    )
    config = ShardConfig(torch=torch_config, max_batch=max(batches), max_prefill_tokens_per_step=_PREFILL_TOKENS)
    engine = TorchEngine(model_dir, model_dir.name, config)
    measured = asyncio.run(_measure(engine, batches, temperature))
    if with_reference:
        reference = ReferenceDecoder(model_dir, num_threads)
        for row in measured["decode"]:
            row["reference_tokens_per_second"] = round(reference.decode_tokens_per_second(row["batch"]), 1)
    return {
        "model": model_dir.name,
        "dtype": dtype,
        "weights": weights,
        "num_threads": num_threads,
        "temperature": temperature,
        **measured,
    }


async def _measure(engine: TorchEngine, batches: Sequence[int], temperature: float) -> dict[str, Any]:
    begin = time.perf_counter()
    await engine.start()
    load_seconds = time.perf_counter() - begin
    try:
        bench = _Bench(engine, temperature)
        prefill = [await bench.prefill_seconds() for _ in range(_PREFILL_RUNS)]
        steps = {batch: await bench.decode_step_seconds(batch) for batch in batches}
    finally:
        await engine.close()
    memory = psutil.Process().memory_info()
    return {
        "batch_invariant": "batch_invariant" in engine.info.capabilities,
        "load_seconds": round(load_seconds, 2),
        "rss_gib": round(memory.rss / 2**30, 2),
        "prefill": {
            "prompt_tokens": _PREFILL_TOKENS,
            "tokens_per_second": round(_PREFILL_TOKENS / statistics.median(prefill), 1),
        },
        "decode": [
            {
                "batch": batch,
                "prompt_tokens": _prompt_lengths(batch),
                "step_ms": round(seconds * 1e3, 1),
                "tokens_per_second": round(batch / seconds, 1),
            }
            for batch, seconds in steps.items()
        ],
    }


class _Bench:
    """Drives one engine with random prompts, no two of which begin alike, so that nothing is reused."""

    def __init__(self, engine: TorchEngine, temperature: float) -> None:
        self._engine = engine
        self._temperature = temperature
        self._steps: AsyncIterator[StepOutput] = engine.steps()
        self._random = random.Random(0)
        self._num_requests = 0

    async def prefill_seconds(self) -> float:
        """Time from submitting a prompt to its first token."""
        begin = time.perf_counter()
        self._submit(_PREFILL_TOKENS, max_tokens=1)
        while not (await anext(self._steps)).token_ids:
            pass
        return time.perf_counter() - begin

    async def decode_step_seconds(self, batch: int) -> float:
        """Median time between two steps in each of which every sequence of the batch got a token."""
        lengths = _prompt_lengths(batch)
        # Sequences that are prefilled first decode alone for a while; all must live for _DECODE_STEPS after that.
        num_prefill_steps = -(-sum(lengths) // _PREFILL_TOKENS) + 1
        for length in lengths:
            self._submit(length, max_tokens=num_prefill_steps + _DECODE_STEPS)
        intervals: list[float] = []
        previous_time: float | None = None
        num_ended = 0
        while num_ended < batch:
            output = await anext(self._steps)
            now = time.perf_counter()
            num_ended += len(output.ends)
            is_full = len(output.token_ids) == batch and not output.starts
            if is_full and previous_time is not None:
                intervals.append(now - previous_time)
            previous_time = now if is_full else None
        return statistics.median(intervals)

    def _submit(self, num_tokens: int, *, max_tokens: int) -> None:
        self._num_requests += 1
        vocab_size = self._engine.info.vocab_size
        prompt = [self._random.randrange(vocab_size) for _ in range(num_tokens)]
        request_id = f"bench-{self._num_requests}"
        self._engine.submit(EngineRequest(request_id, prompt, Sampling(temperature=self._temperature), max_tokens))


def _prompt_lengths(batch: int) -> list[int]:
    shortest, longest = _PROMPT_TOKENS
    if batch == 1:
        return [(shortest + longest) // 2]
    return [shortest + (longest - shortest) * index // (batch - 1) for index in range(batch)]


@click.command("engine")
@option("--model", default=BUILTIN_MODEL_NAME, show_default=True, help="Name, directory or .gguf file.")
@option("--threads", "num_threads", type=click.IntRange(0), default=0, help="0: one per core.")
@option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="What computes.")
@option("--shape", type=click.Choice(list(SHAPES)), default=None, help="Random weights, beside the device's limits.")
@option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@option("--weights", type=click.Choice(["dtype", "int8"]), default="dtype", show_default=True, help="Of linear layers.")
@option("--no-deterministic", is_flag=True, help="Let the last bits depend on the batch: faster prefill.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True, help="0: greedy.")
@option(
    "--reference", "with_reference", is_flag=True, help="Compare with a plain contiguous-KV decoder in the same run."
)
@option("--speculation", "with_speculation", is_flag=True, help="Also what drafts by prompt lookup bring.")
@option("--quantisation", "with_int8_quality", is_flag=True, help="Also what int8 weights change in the answers.")
@option("--vs", default="", help="Compare with others in turn and do nothing else: int8, vllm, llamacpp, by commas.")
@click.option("--rounds", "num_rounds", type=click.IntRange(1, 50), default=3, show_default=True, help="Of --vs.")
@option("--minutes", type=click.FloatRange(1), default=9.0, show_default=True, help="Of --vs: no round begins later.")
@option("--guided", "with_guided", is_flag=True, help="Also what a JSON schema costs per token.")
@data_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_engine(
    model: str,
    num_threads: int,
    device: Literal["cpu", "cuda"],
    shape: str | None,
    dtype: str,
    weights: Literal["dtype", "int8"],
    no_deterministic: bool,
    temperature: float,
    with_reference: bool,
    with_speculation: bool,
    with_int8_quality: bool,
    vs: str,
    num_rounds: int,
    minutes: float,
    with_guided: bool,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """Measure the embedded engine: prefill, decoding at batch 1, 8 and 32, memory, load time."""
    if shape is not None:
        try:
            measured = run_device_bench(shape, device, lambda message: click.echo(message, err=True))
        except EngineError as error:
            raise CommandError(str(error)) from error
        click.echo(json.dumps(measured) if as_json else device_table(measured))
        return
    folder = (data_dir or DEFAULT_DATA_DIR).expanduser().absolute()
    registry = ModelRegistry(folder / "models.json")
    model_dir = resolve_model(model, folder / "models", lambda message: click.echo(message, err=True), registry).path
    if vs:
        names = [name.strip() for name in vs.split(",")]
        if unknown := set(names) - set(CHOICES):
            raise CommandError(f"--vs knows {', '.join(CHOICES)}, not {', '.join(sorted(unknown))}")
        entrants = plan_entrants(names, model, model_dir, num_threads or os.cpu_count() or 1, folder / "engines")
        comparison = compare(
            entrants, num_rounds, lambda message: click.echo(message, err=True), max_seconds=60 * minutes
        )
        click.echo(json.dumps(comparison) if as_json else comparison_table(comparison))
        return
    try:
        report = run_bench(
            model_dir,
            num_threads=num_threads,
            dtype=dtype,
            deterministic=not no_deterministic,
            weights=weights,
            with_reference=with_reference,
            temperature=temperature,
            device=device,
        )
        if with_speculation:
            report["speculation"] = run_speculation(model_dir, (1, 8), report["num_threads"], dtype)
        if with_int8_quality:
            report["int8_quality"] = measure_int8_quality(model_dir, report["num_threads"])
        if with_guided:
            report["guided"] = measure_guided(model_dir, DEFAULT_BATCHES)
    except EngineError as error:
        raise CommandError(str(error)) from error
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    invariance = "batch-invariant" if report["batch_invariant"] else "not batch-invariant"
    weights = ", int8 weights" if report["weights"] == "int8" else ""
    print(f"{report['model']}, {report['dtype']}{weights}, {report['num_threads']} threads, {invariance}")
    print(f"load     {report['load_seconds']:8.2f} s")
    print(f"RSS      {report['rss_gib']:8.2f} GiB")
    prefill = report["prefill"]
    print(f"prefill  {prefill['tokens_per_second']:8.1f} tokens/s  ({prefill['prompt_tokens']}-token prompt)")
    for row in report["decode"]:
        lengths = row["prompt_tokens"]
        print(
            f"decode   {row['tokens_per_second']:8.1f} tokens/s  (batch {row['batch']}, {row['step_ms']} ms a step, "
            f"prompts of {min(lengths)} to {max(lengths)} tokens)"
        )
        if "reference_tokens_per_second" in row:
            print(f"  reference {row['reference_tokens_per_second']:8.1f} tokens/s")
    for row in report.get("speculation", ()):
        print(
            f"speculation, {row['text']}, batch {row['batch']}: {row['tokens_per_second']} tokens/s without, "
            f"{row['with_speculation']} with ({row['speed_up']} times), acceptance {row['acceptance']}"
        )
    if quality := report.get("int8_quality"):
        print(
            f"int8 weights over {quality['num_tokens']} tokens: perplexity {quality['perplexity_int8']} instead of "
            f"{quality['perplexity']}, KL divergence {quality['kl_divergence']}, the likeliest token is the same in "
            f"{quality['top_1_agreement']:.1%}; greedy answers agree for "
            f"{quality['greedy_tokens_agreeing']} of {quality['greedy_answer_tokens']} tokens"
        )
    for row in report.get("guided", ()):
        print(
            f"guided, batch {row['batch']}, temperature {row['temperature']}: {row['added_us_per_token']} us a token "
            f"(at most {row['added_us_per_token_max']}), compiled in {row['compile_ms']} ms"
        )
