"""On a real model speculation changes no token and no logprob, bit for bit, also with guides."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvloom_common.config import SpeculationConfig
from kvloom_common.text.tokenizer import ChatMessage, ModelTokenizer
from lab.shallow_model import write_shallow_model
from shard_server.engines.base import EngineRequest, Guide, GuideKind, Sampling
from shard_server.engines.torch_engine.model_runner import ModelRunner
from shard_server.engines.torch_engine.sampling.guides import GuideState
from shard_server.engines.torch_engine.sampling.llguidance_guides import GuideCompiler
from tests.step_bench import Answer, StepBench, same

BLOCK_SIZE = 16
NUM_BLOCKS = 128
NUMBERS = "Repeat this list: 1. one 2. two 3. three 4. four 5. five 6. six 7. seven 8. eight 9. nine 10. ten"
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    },
    "minItems": 3,
    "maxItems": 5,
}


class Job:
    def __init__(self, question: str, sampling: Sampling, guide: Guide | None = None) -> None:
        self.question, self.sampling, self.guide = question, sampling, guide


JOBS = [
    Job(NUMBERS, Sampling(temperature=0.0, num_logprobs=2)),
    Job(NUMBERS, Sampling(temperature=0.6, seed=3, num_logprobs=1)),
    Job(NUMBERS, Sampling(temperature=0.8, top_p=0.9, seed=4, presence_penalty=0.3, frequency_penalty=0.1)),
    Job("Write one sentence about the sea.", Sampling(temperature=1.0, seed=5, num_logprobs=0)),
    Job("List three people as JSON.", Sampling(temperature=0.0), Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA))),
    Job(
        "List three people as JSON.",
        Sampling(temperature=0.9, seed=6, num_logprobs=1),
        Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    ),
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
    runner = ModelRunner(
        own_model_dir, dtype="bfloat16", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_model_len=2048, num_threads=1
    )
    if not runner.batch_invariant:
        pytest.skip("this machine's kernels are not batch invariant, and the engine does not promise it here")
    return runner


@pytest.fixture(scope="module")
def compiler(model_dir: Path) -> GuideCompiler:
    return GuideCompiler(model_dir / "tokenizer.json", 49152, [0, 2])


@pytest.fixture(scope="module")
def requests(model_dir: Path) -> list[EngineRequest]:
    tokenizer = ModelTokenizer.load(model_dir)
    return [
        EngineRequest(
            f"r{index}",
            tokenizer.encode_now(tokenizer.render_chat([ChatMessage("user", job.question)])),
            job.sampling,
            60,
            stop_token_ids=frozenset({0, 2}) if job.guide else frozenset(),  # The other answers shall be long.
            guide=job.guide,
        )
        for index, job in enumerate(JOBS)
    ]


def run(
    runner: ModelRunner,
    compiler: GuideCompiler,
    requests: list[EngineRequest],
    speculation: SpeculationConfig | None,
    num_blocks: int = NUM_BLOCKS,
) -> tuple[dict[str, Answer], StepBench]:
    bench = StepBench(
        runner, block_size=BLOCK_SIZE, num_blocks=num_blocks, max_batch=8, budget=64, speculation=speculation
    )
    for request in requests:
        bench.answers[request.request_id] = Answer()
        state: Future[GuideState] | None = None
        if request.guide is not None:
            state = Future()
            state.set_result(compiler.start(request.guide, request.stop_token_ids, request.output_token_ids))
        bench.loop.add(request, bench.clock, state)
    return bench.run(), bench


@pytest.mark.timeout(400)  # CPUs without bf16 arithmetic need a quarter of it.
def test_answers_are_the_same_alone_together_preempted_and_resumed(
    runner: ModelRunner, compiler: GuideCompiler, requests: list[EngineRequest]
) -> None:
    """Accepted drafts leave the same KV as decoding, and rejected ones leave none."""
    expected, _ = run(runner, compiler, requests, None)
    speculation = SpeculationConfig(max_draft_tokens=8)
    together, bench = run(runner, compiler, requests, speculation)
    for name, answer in expected.items():
        assert same(together[name], answer), name
    load = bench.loop._load()
    assert load.num_accepted_tokens > 30
    # Without a common prefix no blocks are shared, so some sequences are preempted.
    apart = [dataclasses.replace(request, root_hash=index) for index, request in enumerate(requests)]
    tight, bench = run(runner, compiler, apart, speculation, num_blocks=20)
    assert bench.scheduler.num_preemptions > 0
    for name, answer in expected.items():
        assert same(tight[name], answer), name
    resumed = [dataclasses.replace(r, output_token_ids=expected[r.request_id].token_ids[:25]) for r in requests]
    rests, _ = run(runner, compiler, resumed, speculation)
    for name, answer in expected.items():
        assert rests[name].token_ids == answer.token_ids[25:], name


def test_no_tokens_are_drafted_for_a_request_that_leaves_them_out(
    runner: ModelRunner, compiler: GuideCompiler, requests: list[EngineRequest]
) -> None:
    """In a brownout drafts would take rows of a step from others (docs/operate/brownout.md)."""
    degraded = [dataclasses.replace(requests[0], no_speculation=True, max_tokens=40)]
    _, bench = run(runner, compiler, degraded, SpeculationConfig(max_draft_tokens=8))
    assert bench.loop._load().num_draft_tokens == 0
