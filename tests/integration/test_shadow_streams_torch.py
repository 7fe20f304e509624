"""Answers of an engine that computes are the same with and without a shadow that asks it for logprobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.v1.generation_pb2 import SamplingParams
from kvloom_common.config import ShardConfig, TorchConfig
from shard_server.engines.torch_engine.engine import TorchEngine
from tests.fakes.shadow_world import CANDIDATE, MODEL, PAIR, shadow_world
from tests.fakes.tiny_llama import write_tiny_llama
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

NUM_TOKENS = 16
CONFIG = ShardConfig(num_blocks=64, max_batch=8, max_prefill_tokens_per_step=64, torch=TorchConfig(num_threads=1))
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=2),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={3: 4.0}, seed=3),
)


async def test_answers_do_not_change_when_they_are_sampled(router_redis_url: str, tmp_path: Path) -> None:
    """The shadow asks the engine for something that the client has not asked for: the choice of tokens must not depend
    on it, and its own score of equal weights must be 0 however the tokens were chosen."""
    weights = write_tiny_llama(tmp_path / "tiny")
    async with shadow_world(router_redis_url, model_tokenizer()) as world:
        for name in (MODEL, CANDIDATE):
            await world.add_model(name, TorchEngine(weights, name, CONFIG))
        await world.start_router()
        link = await world.connect()
        await world.wait_for_shards(link, 2)

        async def contents() -> list[object]:
            answers = [await world.ask(link, [3, 7, 9], NUM_TOKENS, model=MODEL, sampling=one) for one in SAMPLINGS]
            return [(one.token_ids, one.texts, one.logprobs, one.finish.reason) for one in answers]

        before = await contents()
        world.shadow()
        assert await contents() == before
        await eventually(lambda: world.sums.num_answers == len(SAMPLINGS), "the scores")
        assert world.sums.gap_per_token == pytest.approx(0, abs=1e-3)
        assert world.metric("kvloom_router_shadow_surprisal_nats_total", **PAIR, under="model") > 1
