"""`kvloom models compare`: what it measures on a fabric, and what it says of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvloom.client.client import Client
from kvloom_common.models.likelihood_gap import GapSums
from kvloom_common.models.served_model import ServedModel
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.sim_sequence import CHOSEN_LOGPROB
from tests.fakes.shadow_world import CANDIDATE, MODEL, ShadowWorld, shadow_world
from tests.fakes.word_tokenizer import word_tokenizer
from tools.failures import CommandError
from tools.models.comparison import Comparison, ComparisonPlan, CpuSeconds, compare, lines, questions, report

pytest_plugins = ("tests.fakes.router_fixtures",)

PLAN = ComparisonPlan(MODEL, CANDIDATE, num_requests=12, max_tokens=4)


@pytest.fixture
def tokenizer(model_dir: Path) -> ModelTokenizer:
    """One that has the words of the simulated engine. The comparison closes it."""
    return ModelTokenizer.load(model_dir)


@pytest.fixture
async def world(router_redis_url: str, tokenizer: ModelTokenizer) -> AsyncIterator[ShadowWorld]:
    async with shadow_world(router_redis_url, tokenizer) as started:
        await started.add_model(MODEL)
        await started.add_model(CANDIDATE)
        await started.start_router()
        await started.wait_for_shards(await started.connect(), 2)
        yield started


async def test_answers_are_scored_and_the_phases_are_timed(world: ShadowWorld, tokenizer: ModelTokenizer) -> None:
    """The candidate's CPU time for scoring must not contain that of answering, and only tokens of answers count."""
    clock, phases = itertools.count(), []

    async def card_of(name: str) -> ServedModel:
        return ServedModel(name, tokenizer)

    async with Client(world.address) as client:
        found = await compare(client, PLAN, card_of, lambda _: 2.0 ** next(clock), phases.append)
    assert len(phases) == 4
    assert found.sums == GapSums(12, 48, 0, 12 * 16, 0, 0)
    assert found.cpu == CpuSeconds(
        scoring=2.0**3 - 2.0**2, decoding_cached=2.0**5 - 2.0**4, scoring_cached=2.0**7 - 2.0**6
    )
    assert 0 < found.num_cached_tokens < found.num_prompt_tokens
    assert found.verdict == "as good"
    assert CHOSEN_LOGPROB < 0  # otherwise nothing was summed


async def test_models_with_other_tokens_are_refused(world: ShadowWorld, tokenizer: ModelTokenizer) -> None:
    """Their likelihoods are those of other texts."""

    async def card_of(name: str) -> ServedModel:
        return ServedModel(name, tokenizer if name == MODEL else ModelTokenizer(word_tokenizer()))

    async with Client(world.address) as client:
        with pytest.raises(CommandError, match="different tokenizers"):
            await compare(client, PLAN, card_of, lambda _: None)


def comparison(gap: float, scatter: float, num_until_detection: int | None) -> Comparison:
    sums = GapSums()
    for number in range(40):
        sums += GapSums.of(10, 10 * (gap + scatter * (-1) ** number))
    return Comparison(PLAN, sums, 100, 60, num_until_detection, CpuSeconds(1.5, 1.0, 4.0))


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        pytest.param(comparison(0.01, 0.01, None), "as good", id="clearly below"),
        pytest.param(comparison(0.2, 0.01, 10), "worse", id="clearly above"),
        pytest.param(comparison(0.05, 0.05, None), "undecided", id="at the threshold"),
    ],
)
def test_the_verdict_says_what_is_known(found: Comparison, verdict: str) -> None:
    """Scripts read the JSON and people the lines: both must say the same."""
    assert report(found)["verdict"] == verdict
    assert any(verdict in line for line in lines(found))
    assert [line.partition("(")[2] for line in lines(found)[-2:]] == ["33%)", "25%)"]
    assert report(found)["cpu_seconds"]["decoding"] == 4.5
    assert report(dataclasses.replace(found, sums=GapSums()))["interval"] is None


def test_prompts_are_different_and_always_the_same() -> None:
    """Answers to one prompt are no sample, and two runs are compared with each other."""
    assert len(set(questions(200))) == 200
    assert questions(20) == questions(200)[:20]
    with pytest.raises(CommandError, match="at most 200"):
        questions(201)
