"""A real model computes a sequence's tokens and logprobs bit for bit the same, however its work is divided.

Failover, preemption and prefix reuse rely on this. The scheduler itself is tested with a fake model in tests/unit.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvloom_common.config import ShardConfig, TorchConfig
from kvloom_common.text.tokenizer import ChatMessage, ModelTokenizer
from lab.shallow_model import write_shallow_model
from shard_server.engines.base import Capability, EngineRequest, Sampling
from shard_server.engines.torch_engine.engine import TorchEngine
from shard_server.engines.torch_engine.model_runner import ModelRunner
from tests.step_bench import Answer, StepBench, same

BLOCK_SIZE = 16
NUM_BLOCKS = 128
MAX_TOKENS = 20

SYSTEM = "You are a helpful assistant who answers in a few words and never invents anything that you do not know."
QUESTIONS = [
    ("Write one sentence about the sea.", Sampling(temperature=0.0, num_logprobs=3)),
    ("Name three colours.", Sampling(temperature=1.0, seed=7, num_logprobs=2)),
    ("Tell me about the history of the printing press.", Sampling(temperature=0.8, top_p=0.9, seed=8, num_logprobs=0)),
    (
        "Why is the sky blue? " * 8,
        Sampling(temperature=0.7, top_k=40, seed=9, presence_penalty=0.5, frequency_penalty=0.2, num_logprobs=1),
    ),
    ("List the planets of the solar system in order, from the sun. " * 5, Sampling(temperature=0.0, num_logprobs=1)),
]


@pytest.fixture(
    scope="module", params=[pytest.param(2, id="2 layers"), pytest.param(0, id="all layers", marks=pytest.mark.long)]
)
def own_model_dir(request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, or its first layers: the same arithmetic, in a fraction of the time."""
    if not request.param:
        return model_dir
    return write_shallow_model(model_dir, tmp_path_factory.mktemp("shallow") / "model", request.param)


@pytest.fixture(scope="module")
def runner(own_model_dir: Path) -> ModelRunner:
    # Only one thread is used: on busy cores two threads that wait for each other take minutes instead of seconds.
    return ModelRunner(
        own_model_dir, dtype="bfloat16", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_model_len=2048, num_threads=1
    )


@pytest.fixture(scope="module")
def requests(model_dir: Path) -> list[EngineRequest]:
    tokenizer = ModelTokenizer.load(model_dir)
    requests: list[EngineRequest] = []
    for index, (question, sampling) in enumerate(QUESTIONS):
        prompt = tokenizer.render_chat([ChatMessage("system", SYSTEM), ChatMessage("user", question)])
        requests.append(EngineRequest(f"r{index}", tokenizer.encode_now(prompt), sampling, MAX_TOKENS))
    return requests


@pytest.fixture(scope="module")
def expected(runner: ModelRunner, requests: list[EngineRequest]) -> dict[str, Answer]:
    """Returns the answers of the requests when each runs alone, on an empty cache, with its prompt in one chunk."""
    if not runner.batch_invariant:
        pytest.skip("this machine's kernels are not batch invariant, and the engine does not promise it here")
    return {request.request_id: bench(runner).run(request)[request.request_id] for request in requests}


def bench(runner: ModelRunner, **options: Any) -> StepBench:
    """Returns a bench with an empty cache over the same KV memory."""
    return StepBench(runner, **{"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, **options})


def differing(answers: dict[str, Answer], expected: dict[str, Answer]) -> list[str]:
    return [name for name in expected if not same(answers[name], expected[name])]


@pytest.mark.parametrize("budget", [512, 48, 7])
def test_batched_and_chunked(
    runner: ModelRunner, requests: list[EngineRequest], expected: dict[str, Answer], budget: int
) -> None:
    """A batch mixes ragged lengths, prefill and decode, and chunks that end anywhere in a block."""
    assert differing(bench(runner, budget=budget).run(*requests), expected) == []


def test_prefix_reused(runner: ModelRunner, requests: list[EngineRequest], expected: dict[str, Answer]) -> None:
    """The second time everything except the end of each prompt is cached."""
    warm = bench(runner)
    warm.run(*requests)
    answers = warm.run(*requests)
    assert differing(answers, expected) == []
    for request in requests:
        start = answers[request.request_id].start
        assert start is not None
        assert start.num_cached_tokens == (len(request.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_preempted(runner: ModelRunner, requests: list[EngineRequest], expected: dict[str, Answer]) -> None:
    """There are so few blocks that sequences are preempted in the middle of their answers and recomputed."""
    # Without a common prefix no blocks are shared, so memory runs out: every sequence needs another block, and there is
    # one block too few.
    apart = [dataclasses.replace(request, root_hash=index) for index, request in enumerate(requests)]
    num_prompt_blocks = sum(-(-len(request.prompt_token_ids) // BLOCK_SIZE) for request in requests)
    tight = bench(runner, num_blocks=num_prompt_blocks + len(requests) - 1)
    assert differing(tight.run(*apart), expected) == []
    assert tight.scheduler.num_preemptions > 0


@pytest.mark.parametrize("num_emitted", [1, 11])
def test_resumed(
    runner: ModelRunner, requests: list[EngineRequest], expected: dict[str, Answer], num_emitted: int
) -> None:
    """On another shard prompt and delivered tokens are prefilled together, and the rest of the answer is the same."""
    resumed = [
        dataclasses.replace(request, output_token_ids=expected[request.request_id].token_ids[:num_emitted])
        for request in requests
    ]
    answers = bench(runner).run(*resumed)
    for request in requests:
        answer, whole = answers[request.request_id], expected[request.request_id]
        assert answer.token_ids == whole.token_ids[num_emitted:]
        assert answer.logprobs == whole.logprobs[num_emitted:]


async def test_the_engine_answers_a_question(model_dir: Path) -> None:
    """TorchEngine is used as the shard server does, on the built-in model; the answer is right and ends by itself."""
    tokenizer = ModelTokenizer.load(model_dir)
    engine = TorchEngine(
        model_dir, "smollm2-135m-instruct", ShardConfig(num_blocks=64, torch=TorchConfig(num_threads=1))
    )
    question = "What is the capital of France? Answer in one short sentence."
    prompt = tokenizer.encode_now(tokenizer.render_chat([ChatMessage("user", question)]))
    async with asyncio.timeout(60):
        await engine.start()
        try:
            assert engine.info.eos_token_ids == tokenizer.eos_token_ids
            assert Capability.PREFIX_CACHING in engine.info.capabilities
            greedy = Sampling(temperature=0.0)
            engine.submit(EngineRequest("a", prompt, greedy, 32, stop_token_ids=engine.info.eos_token_ids))
            token_ids: list[int] = []
            async for output in engine.steps():
                token_ids += [token for tokens in output.token_ids for token in tokens]
                if output.ends:
                    break
        finally:
            await engine.close()
    assert "Paris" in tokenizer.decode(token_ids)
    assert token_ids[-1] in tokenizer.eos_token_ids
