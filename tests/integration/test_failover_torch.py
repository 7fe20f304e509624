"""Faults in the middle of a real model's answers do not change tokens, text and logprobs.

This complements test_failover_exactness with what only a real model has: guides and speculation.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvloom.v1.generation_pb2 import Choices, Guide, SamplingParams, TokenLogprobs
from kvloom_common.config import ShardConfig, SpeculationConfig, TorchConfig
from kvloom_common.text.tokenizer import ChatMessage, ModelTokenizer
from lab.shallow_model import write_shallow_model
from shard_server.engines.base import Capability, EngineRequest
from shard_server.engines.torch_engine.engine import TorchEngine
from tests.fakes.failover_world import MODEL, Collected, Ended, FailoverWorld, failover_world

pytest_plugins = ("tests.fakes.router_fixtures",)

# Several hundred steps of a real model have taken more than two minutes on two busy cores.
pytestmark = pytest.mark.timeout(360)

SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}}, '
    '"required": ["name", "n"], "additionalProperties": false}'
)
EMOJI = "👩‍👧 東京 🏳️‍🌈 ﷽"


@dataclasses.dataclass(frozen=True)
class Case:
    question: str
    sampling: SamplingParams
    n: int = 1
    stop: Sequence[str] = ()
    max_tokens: int = 12
    min_tokens: int = 0
    prediction: str = ""


CAPITAL = "What is the capital of France? Answer in one sentence."
QUESTION = ChatMessage("user", CAPITAL)
CASES = {
    "greedy": Case(CAPITAL, SamplingParams(temperature=0.0)),
    "seeded": Case("Name a colour.", SamplingParams(temperature=1.3, top_p=0.95, top_k=50, seed=2**60)),
    "penalties": Case("Say la la la.", SamplingParams(seed=1, presence_penalty=0.7, frequency_penalty=0.4)),
    "logprobs": Case("Name a fish.", SamplingParams(seed=3, logprobs=3)),
    "adjusted": Case(
        "Name a bird.",
        SamplingParams(seed=7, min_p=0.03, repetition_penalty=1.3, logit_bias={28: 2.0, 30: -100.0}, logprobs=1),
        stop=["a"],
        min_tokens=8,
        prediction="The sparrow is a small bird that sings.",
    ),
    "prompt logprobs": Case(CAPITAL, SamplingParams(temperature=0.0, prompt_logprobs=2)),
    "n": Case("Name an animal.", SamplingParams(seed=4, temperature=1.2), n=3),
    "guide": Case("Name a city.", SamplingParams(seed=5, guide=Guide(json_schema=SCHEMA)), max_tokens=24),
    "guide and utf-8": Case(
        "Emoji!", SamplingParams(seed=6, logprobs=1, guide=Guide(choice=Choices(texts=[EMOJI]))), max_tokens=60
    ),
}


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Iterator[ModelTokenizer]:
    loaded = ModelTokenizer.load(model_dir)
    yield loaded
    loaded.close()


TORCH = {
    "plain": TorchConfig(num_threads=1),
    "speculation": TorchConfig(num_threads=1, speculation=SpeculationConfig(max_draft_tokens=4)),
    "int8": TorchConfig(num_threads=1, weights="int8"),
}


@pytest.fixture(
    scope="module", params=[pytest.param(2, id="2 layers"), pytest.param(0, id="all layers", marks=pytest.mark.long)]
)
def own_model_dir(request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, or its first layers: faults are the same to it, in a tenth of the time."""
    if not request.param:
        return model_dir
    return write_shallow_model(model_dir, tmp_path_factory.mktemp("shallow") / "model", request.param)


@pytest.fixture(params=["speculation", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("plain", "int8"))])
async def world(
    request: pytest.FixtureRequest,
    router_redis_url: str,
    tokenizer: ModelTokenizer,
    own_model_dir: Path,
    load_runner: Callable[..., Any],
) -> AsyncIterator[FailoverWorld]:
    # The engine computes the largest chunk several times when it starts, so the chunks are small here, though longer
    # than the prompts.
    config = ShardConfig(num_blocks=256, max_batch=32, max_prefill_tokens_per_step=64, torch=TORCH[request.param])
    async with failover_world(router_redis_url, tokenizer) as started:
        await started.start_router()
        for number in range(2):
            engine = TorchEngine(own_model_dir, MODEL, config, load_runner=load_runner)
            await started.add_shard(f"shard-{number}", engine, config)
            if Capability.BATCH_INVARIANT not in engine.info.capabilities:
                pytest.skip("this machine's kernels are not batch invariant, and the engine does not promise it here")
        await started.wait_for_shards(started.link, 2)
        yield started


def begin(world: FailoverWorld, case: Case) -> Collected:
    prompt = world.tokenizer.encode_now(world.tokenizer.render_chat([ChatMessage("user", case.question)]))
    stop = {"stop": list(case.stop), "min_tokens": case.min_tokens}
    sampling = SamplingParams(predicted_token_ids=world.tokenizer.encode_now(case.prediction))
    sampling.MergeFrom(case.sampling)
    return world.begin(prompt, case.max_tokens, n=case.n, sampling=sampling, stop=stop)


def prompt_logprobs_of(answers: dict[str, Collected]) -> list[TokenLogprobs]:
    start = answers["prompt logprobs"].starts[0]
    assert start is not None
    return list(start.prompt_logprobs)


async def all_ended(answers: dict[str, Collected]) -> dict[str, list[Ended]]:
    return {name: await answer.ended() for name, answer in answers.items()}


def at_first_attempt(position: int, request: EngineRequest) -> int | None:
    return position if "#1." in request.request_id else None


async def test_real_answers_go_on_as_they_would_have(world: FailoverWorld) -> None:
    """The engine fails each request after some tokens, and then a connection is reset while all of them run."""
    greedy = (await begin(world, CASES["greedy"]).ended())[0].text
    stop_string = dataclasses.replace(CASES["greedy"], stop=[greedy[len(greedy) // 2 :][:5]])
    cases = CASES | {"stop string": stop_string}
    answers = {name: begin(world, case) for name, case in cases.items()}
    expected = await all_ended(answers)
    prompt_logprobs = prompt_logprobs_of(answers)
    assert len(prompt_logprobs) == len(world.tokenizer.encode_now(world.tokenizer.render_chat([QUESTION]))) - 1
    assert expected["guide and utf-8"][0].text == EMOJI
    assert expected["stop string"][0].stop_string
    for position in (0, 1, 4, 7):
        for member in world.members.values():
            member.engine.fails_at = partial(at_first_attempt, position)
        before = world.metered()
        answers = {name: begin(world, case) for name, case in cases.items()}
        assert await all_ended(answers) == expected, position
        assert prompt_logprobs_of(answers) == prompt_logprobs
        after = world.metered()
        assert after["requests"] - before["requests"] == len(cases)
        num_tokens = sum(choice.num_output_tokens for choices in expected.values() for choice in choices)
        assert after["output_tokens"] - before["output_tokens"] == num_tokens
    for member in world.members.values():
        member.engine.fails_at = lambda _: None
    before = world.metered()
    answers = {name: begin(world, case) for name, case in cases.items()}
    await asyncio.gather(*(answer.has_tokens(3) for answer in answers.values()))
    lost = next(answer for answer in answers.values() if not all(answer.finishes))
    assert lost.starts[0] is not None
    world.members[lost.starts[0].shard_id].proxy.reset()
    assert await all_ended(answers) == expected
    assert world.metered()["attempts"] - before["attempts"] > len(cases)
