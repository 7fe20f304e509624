"""Measures the benefit or cost of single techniques of the embedded engine: speculation by prompt lookup, and guided
decoding."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from kvloom_common.config import ShardConfig, SpeculationConfig, TorchConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import EngineError, EngineRequest, Guide, GuideKind, Sampling
from shard_server.engines.torch_engine.engine import TorchEngine
from shard_server.engines.torch_engine.sampling.llguidance_guides import GuideCompiler
from shard_server.engines.torch_engine.sampling.sampler import Draws, SampleRow

SPECULATION: Final = SpeculationConfig(max_draft_tokens=8)
_ROUNDS: Final = 3
_ANSWER_TOKENS: Final = 128
_TEXTS: Final = {
    "repetitive": "".join(f'{{"id": {i}, "name": "item {i}", "color": "red", "price": 10}}\n' for i in range(12)),
    "plain": "The old lighthouse keeper looked out over the grey water and began to tell the children how",
}
_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "address": {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}},
    },
    "required": ["name", "age", "tags", "address"],
}
_DOCUMENT: Final = '{"name": "Ada Lovelace", "age": 36, "tags": ["red", "blue"], "address": {"zip": "12345"}}'


async def measure_speculation(
    model_dir: Path, batches: Sequence[int], num_threads: int, dtype: str, max_seconds: float = math.inf
) -> list[dict[str, Any]]:
    """Measure decoding speed without and with drafts, alternately, for a text that repeats itself (greedy) and for one
    that does not (sampled at temperature 0.8). No further round of a row begins after `max_seconds`. Raises
    EngineError."""
    tokenizer = ModelTokenizer.load(model_dir)
    engines = [_engine(model_dir, num_threads, dtype, speculation) for speculation in (None, SPECULATION)]
    rows: list[dict[str, Any]] = []
    try:
        benches = [await _AnswerBench.start(engine, tokenizer) for engine in engines]
        for text in _TEXTS:
            for batch in batches:
                begin = time.perf_counter()
                runs: list[list[float]] = []
                while not runs or (len(runs) < _ROUNDS and time.perf_counter() - begin < max_seconds):
                    runs.append([await bench.tokens_per_second(text, batch) for bench in benches])
                accepted, drafted = benches[1].take_counts()
                plain, faster = (statistics.median(speeds) for speeds in zip(*runs, strict=True))
                rows.append(
                    {
                        "text": text,
                        "batch": batch,
                        "tokens_per_second": round(plain, 1),
                        "with_speculation": round(faster, 1),
                        "speed_up": round(statistics.median(with_it / without for without, with_it in runs), 2),
                        "acceptance": round(accepted / drafted, 3) if drafted else None,
                        "drafted_per_answer_token": round(drafted / (len(runs) * batch * _ANSWER_TOKENS), 2),
                    }
                )
    finally:
        for engine in engines:
            await engine.close()
        tokenizer.close()
    return rows


def measure_guided(model_dir: Path, batches: Sequence[int]) -> list[dict[str, Any]]:
    """Measure what a JSON schema adds to sampling a token, in microseconds: mask, masked sampling and bookkeeping,
    compared with plain sampling. Raises EngineError."""
    tokenizer = ModelTokenizer.load(model_dir)
    ids = tokenizer.encode_now(_DOCUMENT)
    compiler = GuideCompiler(model_dir / "tokenizer.json", tokenizer.vocab_size, tokenizer.eos_token_ids)
    guide = Guide(GuideKind.JSON_SCHEMA, json.dumps(_SCHEMA))
    begin = time.perf_counter()
    compiler.start(guide, tokenizer.eos_token_ids)
    compile_seconds = time.perf_counter() - begin
    tokenizer.close()
    rows: list[dict[str, Any]] = []
    for temperature in (0.0, 0.8):
        sampling = Sampling(temperature=temperature)
        for batch in batches:
            logits = torch.randn(batch, tokenizer.vocab_size, generator=torch.Generator().manual_seed(0)) * 3
            states = [compiler.start(guide, tokenizer.eos_token_ids) for _ in range(batch)]
            added: list[float] = []
            for position, token_id in enumerate(ids):
                draws = Draws(logits)
                begin = time.perf_counter()
                for row in range(batch):
                    draws.draw(row, SampleRow(sampling, position))
                middle = time.perf_counter()
                for row, state in enumerate(states):
                    draws.draw(row, SampleRow(sampling, position, None, state.mask()))
                    state.take((token_id,))
                added.append((time.perf_counter() - middle - (middle - begin)) / batch)
            rows.append(
                {
                    "batch": batch,
                    "temperature": temperature,
                    "compile_ms": round(compile_seconds * 1e3, 1),
                    "added_us_per_token": round(statistics.median(added) * 1e6),
                    "added_us_per_token_max": round(max(added) * 1e6),
                }
            )
    return rows


class _AnswerBench:
    """One engine that gives answers of _ANSWER_TOKENS tokens."""

    def __init__(self, engine: TorchEngine, tokenizer: ModelTokenizer) -> None:
        self._engine = engine
        self._steps = engine.steps()
        self._prompts = {name: tokenizer.encode_now(text) for name, text in _TEXTS.items()}
        self._num_requests = 0
        self._counts = (0, 0)
        self._counts_taken = (0, 0)

    @classmethod
    async def start(cls, engine: TorchEngine, tokenizer: ModelTokenizer) -> _AnswerBench:
        await engine.start()
        return cls(engine, tokenizer)

    async def tokens_per_second(self, text: str, batch: int) -> float:
        """The rate from the step in which the last sequence got its first token to the end of all."""
        temperature = 0.0 if text == "repetitive" else 0.8
        for seed in range(batch):
            self._num_requests += 1
            sampling = Sampling(temperature=temperature, seed=seed)
            prompt = self._prompts[text]
            self._engine.submit(EngineRequest(f"bench-{self._num_requests}", prompt, sampling, _ANSWER_TOKENS))
        num_started = num_ended = num_tokens = 0
        begin = time.perf_counter()
        while num_ended < batch:
            try:
                output = await anext(self._steps)
            except StopAsyncIteration:
                raise EngineError("the engine has stopped") from None
            if num_started == batch:
                num_tokens += sum(map(len, output.token_ids))
            else:
                begin = time.perf_counter()
            num_started += len(output.starts)
            num_ended += len(output.ends)
            self._counts = (output.load.num_accepted_tokens, output.load.num_draft_tokens)
        if not num_tokens:
            raise EngineError(f"the {batch} sequences never decoded together: this machine is too slow")
        return num_tokens / (time.perf_counter() - begin)

    def take_counts(self) -> tuple[int, int]:
        """Draft tokens accepted and proposed since the last call."""
        accepted, drafted = (now - before for now, before in zip(self._counts, self._counts_taken, strict=True))
        self._counts_taken = self._counts
        return accepted, drafted


def _engine(model_dir: Path, num_threads: int, dtype: str, speculation: SpeculationConfig | None) -> TorchEngine:
    torch_config = TorchConfig(
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        num_threads=num_threads,
        speculation=speculation or SpeculationConfig(),
    )
    return TorchEngine(model_dir, model_dir.name, ShardConfig(torch=torch_config, num_blocks=512))


def run_speculation(
    model_dir: Path, batches: Sequence[int], num_threads: int, dtype: str, max_seconds: float = math.inf
) -> list[dict[str, Any]]:
    """Run `measure_speculation` in an event loop of its own."""
    return asyncio.run(measure_speculation(model_dir, batches, num_threads, dtype, max_seconds))
