"""The simulated engine's timing model and its text."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kvloom_common.config import KvloomConfig, ModelConfig, ShardConfig, SimConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import EngineError, EngineRequest, Sampling
from shard_server.engines.create import create_engine
from shard_server.engines.sim_engine import SimEngine, expected_token_id
from shard_server.engines.sim_tokens import WORD_TOKEN_IDS
from tests.conformance.engine_driver import EngineDriver


async def time_of(engine: SimEngine, *requests: EngineRequest) -> list[float]:
    """Seconds from the submit to each output."""
    begin = time.monotonic()
    for request in requests:
        engine.submit(request)
    times: list[float] = []
    num_ends = 0
    async for output in engine.steps():
        times.append(time.monotonic() - begin)
        num_ends += len(output.ends)
        if num_ends == len(requests):
            return times
    raise AssertionError


def sim(step_ms: float, prefill_tokens_per_second: float, **fields: int) -> SimEngine:
    config = SimConfig(step_ms=step_ms, prefill_tokens_per_second=prefill_tokens_per_second)
    return SimEngine("model", ShardConfig(sim=config, **fields), vocab_size=49152)


async def test_steps_keep_their_pace_without_drift() -> None:
    """Late wake-ups do not add up: 50 steps of 4 ms take 200 ms, whatever each of them did."""
    engine = sim(4.0, 1e9)
    times = await time_of(engine, EngineRequest("a", [5] * 10, Sampling(), 51))
    lags = [seconds - 0.004 * i for i, seconds in enumerate(times)]
    assert lags[-1] >= 0
    assert min(lags[-20:]) < 0.02


async def test_slow_streams_are_not_in_lockstep() -> None:
    """decode_every: two sequences with their first tokens in different steps never share one afterwards."""
    config = SimConfig(step_ms=2.0, prefill_tokens_per_second=1e9, decode_every=4)
    engine = SimEngine("model", ShardConfig(sim=config), vocab_size=49152)
    engine.submit(EngineRequest("a", [5] * 10, Sampling(), 4))
    together: list[list[str]] = []
    num_ends = 0
    async for output in engine.steps():
        if not together:
            engine.submit(EngineRequest("b", [6] * 10, Sampling(), 4))
        if output.request_ids:
            together.append(output.request_ids)
        num_ends += len(output.ends)
        if num_ends == 2:
            break
    assert sorted(together) == [["a"]] * 4 + [["b"]] * 4
    assert ["a"] in together[1:4]
    assert ["b"] in together[1:4]


async def test_prefill_takes_the_time_of_its_tokens_in_chunks() -> None:
    """600 tokens at 10,000 a second: 60 ms to the first token."""
    engine = sim(0.0, 10_000.0, max_prefill_tokens_per_step=200)
    times = await time_of(engine, EngineRequest("a", [5] * 600, Sampling(), 1))
    assert len(times) == 3
    assert 0.058 <= times[-1] <= 0.5


async def test_running_sequences_are_not_stalled_by_a_long_prompt() -> None:
    """Chunked prefill: while the second prompt is computed, the first sequence continues."""
    engine = sim(1.0, 100_000.0, max_prefill_tokens_per_step=100)
    engine.submit(EngineRequest("short", [5] * 10, Sampling(), 30))
    engine.submit(EngineRequest("long", [6] * 1000, Sampling(), 2))
    tokens_before = 0
    async for output in engine.steps():
        if any(start.request_id == "long" for start in output.starts):
            break
        tokens_before += output.request_ids.count("short")
    assert tokens_before >= 8


async def test_as_fast_as_possible_still_lets_others_run() -> None:
    """step_ms = 0 must not starve the event loop."""
    engine = sim(0.0, 1e9)
    running = asyncio.create_task(time_of(engine, EngineRequest("a", [5] * 10, Sampling(), 1000)))
    turns = 0
    while not running.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 500


def test_text_depends_on_prompt_seed_and_position_alone() -> None:
    """So that a test can check any token anywhere."""
    first = [expected_token_id([1, 2, 3], 7, position) for position in range(50)]
    assert first == [expected_token_id((1, 2, 3), 7, position) for position in range(50)]
    assert set(first) <= set(WORD_TOKEN_IDS)
    assert len(set(first)) > 30
    assert first != [expected_token_id([1, 2, 4], 7, position) for position in range(50)]
    assert first != [expected_token_id([1, 2, 3], 2**64 - 1, position) for position in range(50)]


async def test_models_with_answer_seeds_of_their_own_answer_differently() -> None:
    """So that a test can tell which of two models has answered."""
    answers = []
    for answer_seed in (0, 1):
        sim = SimConfig(step_ms=0, prefill_tokens_per_second=1e9, answer_seed=answer_seed)
        driver = EngineDriver(SimEngine("model", ShardConfig(engine="sim", sim=sim), vocab_size=49152))
        (tokens,) = await driver.run(EngineRequest("a", [1, 2, 3], Sampling(seed=7), 50))
        answers.append(tokens)
    assert answers[0] == [expected_token_id([1, 2, 3], 7, position) for position in range(50)]
    assert sum(one == other for one, other in zip(*answers, strict=True)) < 5


def test_a_vocabulary_without_the_words_is_refused() -> None:
    """Rather than to serve ids that mean nothing."""
    with pytest.raises(EngineError, match="vocabulary"):
        SimEngine("model", ShardConfig(), vocab_size=500)


def test_created_from_the_configuration_it_speaks_in_words(model_dir: Path) -> None:
    """The window, the end-of-sequence tokens and the vocabulary are the model's."""
    tokenizer = ModelTokenizer.load(model_dir)
    config = KvloomConfig(model=ModelConfig(name="m", path=str(model_dir)), shard=ShardConfig(engine="sim"))
    info = create_engine(config, tokenizer).info
    assert (info.engine, info.model, info.max_model_len) == ("sim", "m", 8192)
    assert info.eos_token_ids == tokenizer.eos_token_ids
    text = tokenizer.decode(WORD_TOKEN_IDS)
    assert len(text.split()) == len(WORD_TOKEN_IDS)
    assert all(word.isalpha() for word in text.split())
    tokenizer.close()


async def test_an_opening_precedes_the_words(model_dir: Path) -> None:
    """Answers can begin like a tool call, whose parser and events are then measured."""
    tokenizer = ModelTokenizer.load(model_dir)
    opening = '<tool_call>\n{"name": "'
    shard = ShardConfig(engine="sim", sim=SimConfig(step_ms=0, opening=opening))
    engine = create_engine(KvloomConfig(model=ModelConfig(name="m", path=str(model_dir)), shard=shard), tokenizer)
    engine.submit(EngineRequest("r", [1, 2, 3], sampling=Sampling(temperature=0.0, seed=7), max_tokens=20))
    token_ids: list[int] = []
    async for output in engine.steps():
        token_ids += [token_id for ids in output.token_ids for token_id in ids]
        if output.ends:
            break
    assert tokenizer.decode(token_ids).startswith(opening)
    assert len(token_ids) == 20
    assert token_ids[-1] == expected_token_id([1, 2, 3], 7, 19)
    tokenizer.close()


async def test_batch_prefill_yields_to_an_interactive_request() -> None:
    """As in the torch engine: fabrics of simulated shards are for trying what real ones do."""
    engine = sim(0.0, 100_000.0, max_prefill_tokens_per_step=100)
    engine.submit(EngineRequest("batch", [5] * 2000, Sampling(), 1, class_rank=2))
    starts: list[str] = []
    is_first = True
    async for output in engine.steps():
        starts += [start.request_id for start in output.starts]
        if is_first:
            engine.submit(EngineRequest("interactive", [6] * 250, Sampling(), 1))
            is_first = False
        if len(starts) == 2:
            break
    assert starts == ["interactive", "batch"]
    await engine.close()
