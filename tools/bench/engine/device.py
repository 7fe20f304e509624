"""`kvloom bench engine --shape`: the runner with random weights of a real model's shape on one device, compared with
the limits of the device's memory and matrix units."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from shard_server.engines.base import EngineRequest, Sampling
from shard_server.engines.torch_engine.block_pool import BlockPool
from shard_server.engines.torch_engine.checkpoint.weights import expected_shapes
from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.device.runner import DeviceOptions, DeviceRunner, find_device
from shard_server.engines.torch_engine.model_runner import ScheduledSequence
from shard_server.engines.torch_engine.sampling.sampler import Draws
from shard_server.engines.torch_engine.scheduler import Scheduler
from shard_server.engines.torch_engine.step_loop import StepLoop
from tools.bench.engine.model_costs import decode_step_bytes, prefill_operations

_BLOCK_SIZE: Final = 16
_CONTEXT_TOKENS: Final = 512
"""Context length at which every sequence of a decoding batch gets its tokens."""
_WARM_UPS: Final = 3
_DECODE_STEPS: Final = 20
_PREFILL_RUNS: Final = 5
_PARITY_LAYERS: Final = 2
_PARITY_TOKENS: Final = 48
_PUBLISHED: Final = {
    "H200": (4.8e12, 989e12),
    "H100": (3.35e12, 989e12),
    "A100": (2.039e12, 312e12),
    "L40S": (0.864e12, 362e12),
}
"""Bytes per second of memory and dense bf16 operations per second, by a part of the device's name, from its data sheet.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The model's shape and the sizes that are measured."""

    config: LlamaConfig
    batches: tuple[int, ...]
    prefill_tokens: int
    prompts: tuple[int, ...]
    """The numbers of prompts in which they are prefilled in one step."""
    answer_tokens: int
    """Streams through the engine's loop have so many, behind prompts of a fifth of `prefill_tokens`."""
    probe_size: int
    """Side of the square matrices whose product measures the matrix rate."""


def _llama(vocab_size: int, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> LlamaConfig:
    return LlamaConfig(
        model_type="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads // 4,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        qk_norm=False,
        layer_windows=(None,) * num_layers,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        eos_token_ids=frozenset(),
    )


SHAPES: Final = {
    "llama-3-8b": Shape(_llama(128_256, 4096, 14_336, 32, 32), (1, 32, 256), 2048, (1, 5, 32, 200), 160, 8192),
    "tiny": Shape(_llama(512, 64, 160, 2, 4), (1, 3), 64, (1, 5), 12, 128),
}
"""tiny: for trying whether the command works."""


def run_device_bench(
    shape_name: str, device_name: str, on_progress: Callable[[str], None] = lambda _message: None
) -> dict[str, Any]:
    """Return medians. Raises EngineError when the device cannot be used."""
    device = find_device(device_name)
    shape = SHAPES[shape_name]
    on_progress("memory and matrix rate of the device")
    limits = _limits(device, shape.probe_size)
    report: dict[str, Any] = {
        "shape": shape_name,
        "device": device_name,
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "limits": limits,
    }
    for mode, is_invariant in (("fast", False), ("deterministic", True)):
        on_progress(f"{mode}: random weights, {shape_name}")
        runner = _runner(shape, device, is_invariant, on_progress)
        bench = _DeviceBench(runner, shape, device, limits)
        report[mode] = {"batch_invariant": runner.batch_invariant, **bench.measure(on_progress)}
        del runner, bench
        gc.collect()  # the runner and its recorded steps refer to one another
        if device.type == "cuda":
            torch.cuda.empty_cache()
    on_progress("logits against transformers")
    report["parity"] = _parity(shape, device)
    return report


class _DeviceBench:
    def __init__(self, runner: DeviceRunner, shape: Shape, device: torch.device, limits: dict[str, Any]) -> None:
        self._runner = runner
        self._shape = shape
        self._device = device
        self._limits = limits

    def measure(self, on_progress: Callable[[str], None]) -> dict[str, Any]:
        decode: list[dict[str, Any]] = []
        for batch in self._shape.batches:
            on_progress(f"decode, batch {batch}")
            row = self._decode(batch)
            if row is not None:
                decode.append(row)
        on_progress(f"prefill, {self._shape.prefill_tokens} tokens")
        prefill = [self._prefill(number) for number in self._shape.prompts]
        served: list[dict[str, Any]] = []
        for row in decode:
            on_progress(f"the engine's loop, {row['batch']} streams")
            in_turn = self._serve(row["batch"], overlaps=False)["step_ms"]
            served.append({**self._serve(row["batch"], overlaps=True), "step_ms_in_turn": in_turn})
        return {"decode": decode, "prefill": prefill, "served": served}

    def _decode(self, batch: int) -> dict[str, Any] | None:
        """Return None where the KV of the batch does not fit."""
        width = -(-(_CONTEXT_TOKENS + _WARM_UPS + _DECODE_STEPS) // _BLOCK_SIZE)
        if width * batch > self._runner.num_blocks:
            return None
        tables = [range(index * width, (index + 1) * width) for index in range(batch)]

        def step(number: int) -> None:
            position = _CONTEXT_TOKENS + number
            logits = self._runner.run([ScheduledSequence([1], position, table, True) for table in tables])
            draws = Draws(logits)
            assert draws.wants_rows_together == (self._device.type != "cpu")

        seconds = _median_seconds(step, _DECODE_STEPS, self._device)
        context_lengths = [_CONTEXT_TOKENS + _DECODE_STEPS // 2] * batch
        num_bytes = decode_step_bytes(self._shape.config, context_lengths, bytes_per_weight=2, bytes_per_kv_number=2)
        return {
            "batch": batch,
            "step_ms": round(seconds * 1e3, 3),
            "tokens_per_second": round(batch / seconds, 1),
            **self._shares("bandwidth", num_bytes / seconds),
        }

    def _prefill(self, num_prompts: int) -> dict[str, Any]:
        """Measure a step that computes `prefill_tokens` in any number of prompts."""
        length = self._shape.prefill_tokens // num_prompts
        width = -(-length // _BLOCK_SIZE)
        batch = [
            ScheduledSequence(self._random_ids(length, number), 0, range(number * width, (number + 1) * width), True)
            for number in range(num_prompts)
        ]
        seconds = _median_seconds(lambda _: self._runner.run(batch), _PREFILL_RUNS, self._device)
        operations = num_prompts * prefill_operations(self._shape.config, length)
        return {
            "prompts": num_prompts,
            "tokens_per_second": round(num_prompts * length / seconds, 1),
            **self._shares("matrix_rate", operations / seconds),
        }

    def _serve(self, num_streams: int, *, overlaps: bool) -> dict[str, Any]:
        """The engine's loop, without HTTP: streams that begin at once, whose prompts have the first block in common.
        Without `overlaps` a step ends before the next one begins."""
        shape, budget = self._shape, self._shape.prefill_tokens
        pool = BlockPool(self._runner.num_blocks, _BLOCK_SIZE)
        scheduler = Scheduler(pool, max_batch=num_streams, max_prefill_tokens_per_step=budget)
        loop = StepLoop(self._runner, scheduler, overlaps=overlaps)
        loop.warm_up(budget)
        begin = time.perf_counter()
        for number in range(num_streams):
            ids = [0] * _BLOCK_SIZE + self._random_ids(budget // 5, number)
            loop.add(EngineRequest(str(number), ids, Sampling(temperature=0), shape.answer_tokens), begin)
        firsts: list[float] = []
        gaps: list[float] = []
        last = begin
        while loop.has_work:
            output, now = loop.step(), time.perf_counter()
            if output is not None and output.starts:
                firsts += [now - begin] * len(output.starts)
            elif len(firsts) == num_streams and output is not None and not output.ends:
                gaps.append(now - last)
            last = now
        return {
            "streams": num_streams,
            "step_ms": round(statistics.median(gaps) * 1e3, 3),
            "tokens_per_second": round(num_streams * shape.answer_tokens / (last - begin), 1),
            "ttft_p50": round(statistics.median(firsts), 3),
            "ttft_p99": round(firsts[-1 - len(firsts) // 100], 3),
        }

    def _random_ids(self, number: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self._shape.config.vocab_size, (number,), generator=generator).tolist()

    def _shares(self, what: str, rate: float) -> dict[str, float]:
        return {
            f"of_{kind}_{what}": round(rate / self._limits[f"{kind}_{what}"], 3)
            for kind in ("measured", "published")
            if f"{kind}_{what}" in self._limits
        }


def _runner(
    shape: Shape, device: torch.device, wants_batch_invariance: bool, on_progress: Callable[[str], None]
) -> DeviceRunner:
    config = shape.config
    width = -(-(max(_CONTEXT_TOKENS, shape.prefill_tokens) + 64) // _BLOCK_SIZE)
    on_cpu = width * max(shape.batches)
    options = DeviceOptions(
        device,
        torch.bfloat16,
        _BLOCK_SIZE,
        num_blocks=0 if device.type == "cuda" else on_cpu,
        max_model_len=width * _BLOCK_SIZE,
        max_rows=max(shape.batches),
        wants_batch_invariance=wants_batch_invariance,
    )
    return DeviceRunner(config, random_weights(config, torch.bfloat16, device), options, on_progress)


def random_weights(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights of such sizes that activations stay of the size of one."""
    generator = torch.Generator(device).manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for name, size in expected_shapes(config).items():
        weight = torch.randn(size, generator=generator, dtype=dtype, device=device)
        weights[name] = torch.ones_like(weight) if len(size) == 1 else weight.mul_(size[1] ** -0.5)
    return weights


def _limits(device: torch.device, size: int) -> dict[str, Any]:
    """The rates that a copy and a product reach here, and those of the data sheet."""
    source = torch.empty(size * size * 8, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copy_seconds = _median_seconds(lambda _: target.copy_(source), 10, device)
    left = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    product_seconds = _median_seconds(lambda _: left @ left, 10, device)
    limits: dict[str, Any] = {
        "measured_bandwidth": 2 * source.nbytes / copy_seconds,
        "measured_matrix_rate": 2 * size**3 / product_seconds,
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for known, (bandwidth, matrix_rate) in _PUBLISHED.items():
        if known in name:
            limits |= {"published_bandwidth": bandwidth, "published_matrix_rate": matrix_rate}
    return limits


def _parity(shape: Shape, device: torch.device) -> dict[str, Any]:
    """The largest difference of a logit from transformers' in float32, for the first layers: a prompt in two parts,
    then tokens one by one."""
    try:
        # Not an import statement: analysing the package's types takes a fifth of `make types`.
        transformers = importlib.import_module("transformers")
    except ImportError:
        return {"skipped": "transformers is not installed"}
    config = dataclasses.replace(
        shape.config, num_layers=_PARITY_LAYERS, layer_windows=(None,) * _PARITY_LAYERS, max_position_embeddings=256
    )
    weights = random_weights(config, torch.float32, device)
    reference_config = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
    )
    with device:
        reference = transformers.LlamaForCausalLM(reference_config)
    reference.load_state_dict(weights)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, config.vocab_size, (_PARITY_TOKENS,), generator=generator).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([ids], device=device)).logits[0]
    runner = DeviceRunner(config, weights, DeviceOptions(device, torch.float32, _BLOCK_SIZE, num_blocks=8, max_rows=4))
    table: Sequence[int] = [5, 1, 4]
    runner.run([ScheduledSequence(ids[:10], 0, table, False)])
    half = _PARITY_TOKENS // 2
    rows = [runner.run([ScheduledSequence(ids[10:half], 10, table, True)]).clone()]
    rows += [runner.run([ScheduledSequence(ids[i : i + 1], i, table, True)]).clone() for i in range(half, len(ids))]
    actual = torch.cat(rows)
    difference = (actual - expected[half - 1 :]).abs().max()
    agreement = (actual.argmax(-1) == expected[half - 1 :].argmax(-1)).float().mean()
    return {
        "layers": config.num_layers,
        "largest_logit_difference": float(f"{float(difference):.2e}"),
        "same_likeliest_token": round(float(agreement), 3),
    }


def _median_seconds(run: Callable[[int], object], num_runs: int, device: torch.device) -> float:
    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds: list[float] = []
    for number in range(_WARM_UPS + num_runs):
        synchronise()
        begin = time.perf_counter()
        run(number)
        synchronise()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[_WARM_UPS:])


def device_table(report: dict[str, Any]) -> str:
    """Render the report as Markdown."""
    limits = report["limits"]
    lines = [
        f"{report['name']}, torch {report['torch']}, {report['shape']}, bf16, random weights",
        f"a copy reaches {limits['measured_bandwidth'] / 1e9:,.0f} GB/s, a matrix product "
        f"{limits['measured_matrix_rate'] / 1e12:,.1f} TFLOP/s",
        "",
        "| | fast | deterministic |",
        "|---|---|---|",
    ]
    modes = [report["fast"], report["deterministic"]]
    lines.append(
        "| batch-invariant | " + " | ".join("yes" if mode["batch_invariant"] else "no" for mode in modes) + " |"
    )
    for index, row in enumerate(modes[0]["decode"]):
        cells = [_cell(mode["decode"][index], "bandwidth") for mode in modes]
        lines.append(f"| decode, batch {row['batch']} | {' | '.join(cells)} |")
    for index, row in enumerate(modes[0]["prefill"]):
        cells = [_cell(mode["prefill"][index], "matrix_rate") for mode in modes]
        lines.append(f"| prefill, prompts in a step: {row['prompts']} | {' | '.join(cells)} |")
    for index, row in enumerate(modes[0]["served"]):
        cells = [_served_cell(mode["served"][index], mode["decode"][index]) for mode in modes]
        lines.append(f"| streams at once: {row['streams']} | {' | '.join(cells)} |")
    parity = report["parity"]
    lines += ["", f"against transformers: {', '.join(f'{key} {value}' for key, value in parity.items())}"]
    return "\n".join(lines)


def _cell(row: dict[str, Any], what: str) -> str:
    shares = [
        f"{row[f'of_{kind}_{what}']:.0%} of the {kind} {what.replace('_', ' ')}"
        for kind in ("published", "measured")
        if f"of_{kind}_{what}" in row
    ]
    return f"{row['tokens_per_second']:,.0f} tokens/s ({', '.join(shares)})"


def _served_cell(row: dict[str, Any], alone: dict[str, Any]) -> str:
    return (
        f"{row['tokens_per_second']:,.0f} tokens/s, TTFT {row['ttft_p50']:.2f} / {row['ttft_p99']:.2f} s (p50, p99), "
        f"{row['step_ms']:.1f} ms a step ({row['step_ms'] / alone['step_ms'] - 1:+.0%} over the runner; "
        f"{row['step_ms_in_turn']:.1f} if steps do not overlap)"
    )
