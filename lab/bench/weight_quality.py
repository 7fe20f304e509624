"""`kvloom-lab bench weight-quality`: how number and weight formats and kernel families change the answers. Each is
compared with float64 on a text that every Python has and on a few greedy answers."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pydoc_data.topics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from kvloom.errors import KvloomError
from kvloom_common.text.tokenizer import ChatMessage, ModelTokenizer
from lab.bench.experiment import Report, experiment, show_progress
from lab.flags import DATA_DIR, MODEL, count, number
from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.packed_files import load_packed
from shard_server.engines.torch_engine.checkpoint.weights import load_weights
from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.grouped_weight import plain
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.model import LlamaModel
from shard_server.engines.torch_engine.model_runner import ModelRunner, ScheduledSequence
from shard_server.engines.torch_engine.operators.linear import TorchLinears
from tools.bench.engine.command import resolve
from tools.failures import CommandError

FORMATS: Final[dict[str, dict[str, Any]]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "packed": {"dtype": "bfloat16", "weights": "packed"},
    "int8": {"dtype": "bfloat16", "weights": "int8"},
    "int4": {"dtype": "bfloat16", "weights": "int4"},
}
"""The options of ModelRunner for each format that is compared with float64."""
_BLOCK_SIZE: Final = 16
_NUM_WINDOWS: Final = 6
_WINDOW_TOKENS: Final = 384
_ANSWER_TOKENS: Final = 64
_QUESTIONS: Final = (
    "What is the capital of France? Answer in one sentence.",
    "Name three colours.",
    "Why is the sky blue?",
    "Tell me about the history of the printing press.",
    "How do I boil an egg?",
    "Write one sentence about the sea.",
)


class _Sample(msgspec.Struct, frozen=True):
    """The results of one model. The lists are shorter than those of the texts if time ran out."""

    log_probabilities: list[torch.Tensor]
    """By window: float32 [tokens - 1, vocab_size]."""
    answers: list[list[int]]


def measure_quality(
    model_dir: Path,
    num_threads: int,
    max_seconds: float = math.inf,
    on_progress: Callable[[str], None] = lambda _message: None,
    kernels: Sequence[str] = ("auto",),
) -> dict[str, Any]:
    """Compare FORMATS, with each of `kernels` (as in kvloom_common.config.TorchConfig), with float64, one model in
    memory at a time.

    `greedy_tokens_agreeing` counts, for every question, the tokens of the two answers before the first difference;
    `greedy_answer_tokens` counts those of the float64 answer. `largest_gap`: where another token is the likeliest, how
    much likelier, in nats, float64 finds its own, at most: small if only tokens that are about as likely change places.

    If float64 takes longer than `max_seconds` over the text or the answers, it and all formats compute fewer of them. A
    format that cannot be computed here has a `note` instead of figures. Raises EngineError.
    """
    windows, prompts = _texts(model_dir)
    on_progress("quality: float64")
    exact = _sample(_exact_runner(model_dir, num_threads), windows, prompts, max_seconds)
    windows, prompts = windows[: len(exact.log_probabilities)], prompts[: len(exact.answers)]
    rows: list[dict[str, Any]] = []
    for family, (name, options) in itertools.product(kernels, FORMATS.items()):
        on_progress(f"quality: {name}, kernels {family}")
        row: dict[str, Any] = {"format": name, "kernels": family}
        rows.append(row)
        try:
            sample = _sample(_runner(model_dir, num_threads, {**options, "kernels": family}), windows, prompts)
        except EngineError as error:
            row["note"] = str(error)
        else:
            row |= {"note": None, **_compared(exact, sample, windows)}
    return {
        "num_tokens": sum(len(window) - 1 for window in windows),
        "perplexity": round(_perplexity(exact, windows), 3),
        "greedy_answer_tokens": [len(answer) for answer in exact.answers],
        "formats": rows,
    }


def quality_table(quality: dict[str, Any]) -> str:
    """Render the measurement as text."""
    lines = [f"quality, {quality['num_tokens']} tokens: float64 has perplexity {quality['perplexity']}"]
    for row in quality["formats"]:
        name = f"  {row['format']:9} {row['kernels']:12}"
        if row["note"]:
            lines.append(f"{name} no sample: {row['note']}")
            continue
        lines.append(
            f"{name} perplexity {row['perplexity']}, KL divergence {row['kl_divergence']} from float64, the likeliest "
            f"token is the same in {row['top_1_agreement']:.1%}, otherwise by at most {row['largest_gap']} nats less "
            f"likely; greedy answers agree for {row['greedy_tokens_agreeing']} of "
            f"{quality['greedy_answer_tokens']} tokens"
        )
    return "\n".join(lines)


def _texts(model_dir: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Windows of a long text, and questions as prompts; all as token ids."""
    tokenizer = ModelTokenizer.load(model_dir)
    topics = pydoc_data.topics.topics
    ids = tokenizer.encode_now("\n\n".join(topics[name] for name in sorted(topics)))
    stride = (len(ids) - _WINDOW_TOKENS) // (_NUM_WINDOWS - 1)
    windows = [ids[index * stride : index * stride + _WINDOW_TOKENS] for index in range(_NUM_WINDOWS)]
    prompts = [tokenizer.encode_now(_as_prompt(tokenizer, question))[-_WINDOW_TOKENS:] for question in _QUESTIONS]
    tokenizer.close()
    return windows, prompts


def _as_prompt(tokenizer: ModelTokenizer, question: str) -> str:
    try:
        return tokenizer.render_chat([ChatMessage("user", question)])
    except KvloomError:  # a base model, without a chat template
        return question


def _runner(model_dir: Path, num_threads: int, options: dict[str, Any]) -> ModelRunner:
    return ModelRunner(
        model_dir,
        block_size=_BLOCK_SIZE,
        num_blocks=(_WINDOW_TOKENS + _ANSWER_TOKENS) // _BLOCK_SIZE + 1,
        max_model_len=_WINDOW_TOKENS + _ANSWER_TOKENS,
        num_threads=num_threads,
        **options,
    )


def _exact_runner(model_dir: Path, num_threads: int) -> ExactRunner:
    num_blocks = (_WINDOW_TOKENS + _ANSWER_TOKENS) // _BLOCK_SIZE + 1
    return ExactRunner(model_dir, block_size=_BLOCK_SIZE, num_blocks=num_blocks, num_threads=num_threads)


def _sample(
    runner: ModelRunner | ExactRunner, windows: list[list[int]], prompts: list[list[int]], max_seconds: float = math.inf
) -> _Sample:
    """Windows and answers get `max_seconds` each. The first of each is computed however long it takes."""
    sample = _Sample([], [])
    end = time.perf_counter() + max_seconds
    for window in windows:
        sample.log_probabilities.append(_log_probabilities(runner, window))
        if time.perf_counter() > end:
            break
    end = time.perf_counter() + max_seconds
    for prompt in prompts:
        sample.answers.append(_answer(runner, prompt))
        if time.perf_counter() > end:
            break
    return sample


def _compared(exact: _Sample, other: _Sample, windows: list[list[int]]) -> dict[str, Any]:
    divergences: list[float] = []
    agreements: list[bool] = []
    gaps: list[float] = []
    for expected, actual in zip(exact.log_probabilities, other.log_probabilities, strict=True):
        divergences += (expected.exp() * (expected - actual)).sum(1).tolist()
        likeliest = actual.argmax(1, keepdim=True)
        agreements += (expected.argmax(1) == likeliest[:, 0]).tolist()
        gaps.append((expected.amax(1) - expected.gather(1, likeliest)[:, 0]).max().item())
    return {
        "perplexity": round(_perplexity(other, windows), 3),
        "kl_divergence": round(sum(divergences) / len(divergences), 6),
        "top_1_agreement": round(sum(agreements) / len(agreements), 4),
        "largest_gap": round(max(gaps), 3),
        "greedy_tokens_agreeing": [_num_agreeing(*pair) for pair in zip(exact.answers, other.answers, strict=True)],
    }


def _perplexity(sample: _Sample, windows: list[list[int]]) -> float:
    losses: list[float] = []
    for log_probabilities, window in zip(sample.log_probabilities, windows, strict=True):
        losses += (-log_probabilities.gather(1, torch.tensor(window[1:])[:, None])[:, 0]).tolist()
    return torch.tensor(losses).mean().exp().item()


def _log_probabilities(runner: ModelRunner | ExactRunner, token_ids: list[int]) -> torch.Tensor:
    """float32 [len(token_ids) - 1, vocab_size]: the distribution after every token but the last."""
    blocks = list(range(-(-len(token_ids) // _BLOCK_SIZE)))
    # All tokens but the first are drafts, so that there are logits after every token.
    logits = runner.run([ScheduledSequence(token_ids, 0, blocks, True, len(token_ids) - 1)])
    return torch.log_softmax(logits[:-1], -1)


def _answer(runner: ModelRunner | ExactRunner, prompt: list[int]) -> list[int]:
    """A greedy answer, up to the end of the sequence."""
    known, num_computed = list(prompt), 0
    for _ in range(_ANSWER_TOKENS):
        blocks = list(range(-(-len(known) // _BLOCK_SIZE)))
        logits = runner.run([ScheduledSequence(known[num_computed:], num_computed, blocks, True)])
        num_computed = len(known)
        known.append(int(logits[0].argmax()))
        if known[-1] in runner.eos_token_ids:
            break
    return known[len(prompt) :]


def _num_agreeing(first: list[int], second: list[int]) -> int:
    same = [a == b for a, b in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)


class ExactRunner:
    """Computes what ModelRunner does, for batches of one sequence whose blocks are 0, 1, 2 and so on. The weights are
    those of the files, unrounded. Raises EngineError."""

    def __init__(self, model_dir: Path, *, block_size: int, num_blocks: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._config = config = load_config(model_dir)
        self.eos_token_ids = config.eos_token_ids
        num_tokens = num_blocks * block_size
        with torch.inference_mode():
            packed = {name: plain(weight, torch.float64) for name, weight in load_packed(model_dir, config).items()}
            weights = load_weights(model_dir, config) | packed
            linears = TorchLinears(None)
            self._model = LlamaModel(config, weights, dtype=torch.float64, max_model_len=num_tokens, linears=linears)
            self._cache = KvCache(config, num_blocks=num_blocks, block_size=block_size, dtype=torch.float64)
            self._token_rows = self._cache.token_rows(range(num_tokens))

    @torch.inference_mode()
    def run(self, batch: Sequence[ScheduledSequence]) -> torch.Tensor:
        """float32 logits [num_logits, vocab_size] of the only sequence of `batch`."""
        [sequence] = batch
        first, num_new = sequence.num_computed_tokens, len(sequence.token_ids)
        positions = torch.arange(first, first + num_new)

        def attend(layer: int, queries: torch.Tensor) -> torch.Tensor:
            return self._attend(layer, positions, queries)

        return self._model.forward(
            torch.tensor(list(sequence.token_ids)),
            positions,
            torch.arange(num_new - sequence.num_logits, num_new),
            self._token_rows[:, first : first + num_new],
            attend,
            self._cache,
        )

    def _attend(self, layer: int, positions: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        config, end = self._config, int(positions[-1]) + 1
        rows = self._cache.all_token_rows[self._token_rows[layer, :end]]
        keys_and_values = rows.view(end, 2, config.num_kv_heads, config.head_dim)
        keys, values = keys_and_values.repeat_interleave(config.num_heads_per_kv_head, 2).unbind(1)
        heads = queries.unflatten(-1, (-1, config.head_dim))
        scores = torch.einsum("qhd,khd->hqk", heads, keys) * config.head_dim**-0.5
        distances = positions[:, None] - torch.arange(end)
        window = config.layer_windows[layer]
        is_hidden = (distances < 0) | (distances >= (window or end))
        shares = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", shares, values).flatten(1)


def _runnable_kernels() -> list[str]:
    """Every family of kernels that runs here; torch's operators where numba is missing."""
    with contextlib.suppress(ImportError):
        from shard_server.engines.torch_engine.kernels.families import runnable_families

        return [family.name for family in runnable_families()]
    return ["auto"]


@experiment(
    "weight-quality",
    MODEL,
    count("--threads", 0, "0: one per core.", least=0, to="num_threads"),
    number("--seconds", 60.0, "How long float64 may take over the text, and over the answers.", to="max_seconds"),
    DATA_DIR,
)
def bench_weight_quality(model: str, num_threads: int, max_seconds: float, data_dir: Path | None) -> Report:
    """Compare each format of weights, with each family of kernels, with float64: perplexity, divergence, answers."""
    _, model_dir = resolve(model, data_dir)
    try:
        quality = measure_quality(
            model_dir, num_threads or os.cpu_count() or 1, max_seconds, show_progress, _runnable_kernels()
        )
    except EngineError as error:
        raise CommandError(str(error)) from error
    return Report(quality, [quality_table(quality)])
