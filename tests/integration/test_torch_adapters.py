"""LoRA adapters of the torch engine: exact in every batch, and what merged weights compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom_common.config import ShardConfig, SpeculationConfig, TorchConfig
from kvloom_common.text.tokenizer import ChatMessage, ModelTokenizer
from lab.shallow_model import write_shallow_model
from lab.train_adapter import ANSWER, QUESTIONS, TrainingPlan, train, write
from shard_server.engines.base import EngineRequest, Sampling
from shard_server.engines.torch_engine.engine import TorchEngine
from shard_server.engines.torch_engine.lora.peft import read_adapter
from shard_server.engines.torch_engine.model_runner import ModelRunner, ScheduledSequence
from tests.conformance.engine_driver import EngineDriver, request_of
from tests.fakes.int8_products import skip_unless_exact
from tests.fakes.peft_adapter import write_merged_model, write_peft_adapter
from tests.step_bench import Answer, StepBench, same

BLOCK_SIZE = 16
BLOCKS_EACH = 8
PROMPT_LENGTH = 60
LENGTHS = (37, 5, 64, 70, 1, 16)
KINDS: dict[str, dict[str, Any]] = {
    "compiled": {"dtype": "bfloat16"},
    "compiled int8": {"dtype": "bfloat16", "weights": "int8"},
    "torch bf16": {"dtype": "bfloat16", "kernels": "torch"},
    "torch float32": {"dtype": "float32"},
    "torch int8": {"dtype": "float32", "weights": "int8", "kernels": "torch"},
}


def prompt_of(runner: ModelRunner, seed: int, length: int) -> list[int]:
    return torch.randint(3, runner.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def load(model_dir: Path, options: dict[str, Any]) -> ModelRunner:
    sizes = {"block_size": BLOCK_SIZE, "num_blocks": 96, "max_model_len": 512, "num_threads": 1}
    return ModelRunner(model_dir, **sizes, **options)


@pytest.fixture(scope="module", params=[2048, pytest.param(0, id="all tokens", marks=pytest.mark.long)])
def own_model_dir(request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of the built-in model, with all or only the first of its tokens, which are most of its size."""
    path = write_shallow_model(model_dir, tmp_path_factory.mktemp("models") / "shallow", num_layers=3)
    if request.param:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "vocab_size": request.param}))
        for file in path.glob("*.safetensors"):
            tensors = load_file(file)
            for name in tensors.keys() & {"model.embed_tokens.weight"}:
                tensors[name] = tensors[name][: request.param].contiguous()
            save_file(tensors, file)
    return path


@pytest.fixture(scope="module")
def adapter_dirs(own_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of all modules, and of the usual two with another rank."""
    folder = tmp_path_factory.mktemp("adapters")
    return [
        write_peft_adapter(own_model_dir, folder / "all", rank=8, seed=1),
        write_peft_adapter(own_model_dir, folder / "two", rank=5, modules=["q_proj", "v_proj"], seed=2, size=0.3),
    ]


class Bench:
    def __init__(self, runner: ModelRunner, adapter_dirs: list[Path], options: dict[str, Any]) -> None:
        self.runner, self.options = runner, options
        self.prompts = [prompt_of(runner, length, length) for length in LENGTHS]
        weights = [read_adapter(path, runner.config, max_rank=64) for path in adapter_dirs]
        self.adapters: list[Any] = [None, *(runner.adapter(own) for own in weights)]

    def scheduled(self, index: int, start: int, end: int) -> ScheduledSequence:
        """Tokens of a prompt; which adapter it has follows from its place."""
        table = range(index * BLOCKS_EACH, (index + 1) * BLOCKS_EACH)
        tokens = self.prompts[index][start:end]
        adapter = self.adapters[index % len(self.adapters)]
        return ScheduledSequence(tokens, start, table, wants_logits=end == len(self.prompts[index]), adapter=adapter)

    def whole(self, index: int) -> ScheduledSequence:
        return self.scheduled(index, 0, len(self.prompts[index]))


SLOW = "torch bf16"
"""CPUs without bf16 arithmetic take a quarter of a minute for one of its tests."""


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=pytest.mark.long if kind == SLOW else ()) for kind in KINDS]
)
def bench(request: pytest.FixtureRequest, own_model_dir: Path, adapter_dirs: list[Path]) -> Bench:
    if request.param == "torch int8":
        skip_unless_exact()
    runner = load(own_model_dir, KINDS[request.param])
    if not runner.batch_invariant:
        pytest.skip("this machine's kernels are not batch invariant, and the engine does not promise it here")
    return Bench(runner, adapter_dirs, KINDS[request.param])


def test_a_sequence_has_the_same_bits_alone_and_in_a_mixed_batch(bench: Bench) -> None:
    """Two adapters and the model itself in one batch, as whole prompts and cut into chunks and single tokens."""
    alone = [bench.runner.run([bench.whole(index)]).clone() for index in range(len(LENGTHS))]
    together = bench.runner.run([bench.whole(index) for index in range(len(LENGTHS))])
    assert torch.equal(together, torch.cat(alone))
    for index, prompt in enumerate(bench.prompts):
        others = [bench.whole(other) for other in range(len(LENGTHS)) if other not in (index, 4)]
        cut, last = len(prompt) // 3, len(prompt) - 1
        if cut:
            bench.runner.run([bench.scheduled(index, 0, cut), *others])
        if cut < last:
            bench.runner.run([*others[:2], bench.scheduled(index, cut, last)])
        decoded = bench.runner.run([*others, bench.scheduled(index, last, last + 1)])
        assert torch.equal(decoded[-1:], alone[index]), f"sequence {index}"


def test_adapters_change_the_logits_and_only_their_own(bench: Bench) -> None:
    """The comparison of bits would also hold if adapters did nothing at all."""
    of_each = []
    for adapter in bench.adapters:
        scheduled = bench.whole(0)
        scheduled.adapter = adapter
        of_each.append(bench.runner.run([scheduled]).clone()[0])
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert torch.cosine_similarity(of_each[first], of_each[second], dim=0) < 0.999


@pytest.mark.parametrize("number", [0, 1])
def test_logits_are_those_of_merged_weights(
    bench: Bench,
    own_model_dir: Path,
    adapter_dirs: list[Path],
    number: int,
    tmp_path: Path,
) -> None:
    """Merging is what the adapter means; it rounds the sums of weights where we round the sums of products."""
    merged_dir = write_merged_model(own_model_dir, adapter_dirs[number], tmp_path / "merged")
    merged = load(merged_dir, bench.options)
    # With int8 weights, merged ones are rounded to other steps than the model's own.
    least = 0.999 if "weights" in bench.options else 0.9999
    for index in (0, 2, 3):
        scheduled = bench.whole(index)
        scheduled.adapter = None
        expected = merged.run([scheduled]).clone()[0]
        scheduled.adapter = bench.adapters[number + 1]
        own = bench.runner.run([scheduled])[0]
        assert torch.cosine_similarity(own, expected, dim=0) > least


def answer_of(runner: ModelRunner, adapter: Any, *others: Any, **options: Any) -> Answer:
    """The answer to a prompt with an adapter, beside sequences with `others`."""
    bench = StepBench(runner, block_size=BLOCK_SIZE, num_blocks=96, **options)
    prompt = prompt_of(runner, 1, PROMPT_LENGTH)
    sampling = Sampling(temperature=0.0, num_logprobs=2, num_prompt_logprobs=1)
    for index, own in enumerate((adapter, *others)):
        request = EngineRequest(str(index), prompt, sampling, 40, root_hash=index)
        loaded: Future[Any] = Future()
        loaded.set_result(own)
        bench.answers[str(index)] = Answer()
        bench.loop.add(request, bench.clock, None, loaded if own is not None else None)
    answer = bench.run()["0"]
    assert answer.start is not None
    answer.logprobs = [*answer.start.prompt_logprobs, *answer.logprobs]
    return answer


@pytest.mark.parametrize("number", [0, 1, 2])
def test_speculation_and_chunks_change_no_bit_of_an_answer(
    own_model_dir: Path, adapter_dirs: list[Path], number: int
) -> None:
    """Drafts are verified with the sequence's own adapter, among rows of others; logprobs of the prompt come from the
    adapter, too."""
    bench = Bench(load(own_model_dir, KINDS["compiled"]), adapter_dirs, {})
    adapter, *others = bench.adapters[number:] + bench.adapters[:number]
    alone = answer_of(bench.runner, adapter)
    assert len(alone.logprobs) == PROMPT_LENGTH - 1 + 40
    speculation = SpeculationConfig(max_draft_tokens=4)
    assert same(answer_of(bench.runner, adapter, *others, speculation=speculation, budget=23), alone)


@pytest.fixture(scope="module")
def trained_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small adapter, trained in some ten seconds."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plan = TrainingPlan(num_layers=6, num_steps=10)
    lora, losses = train(model_dir, plan, QUESTIONS[:3])
    torch.set_num_threads(num_threads)
    assert losses[-1] < 0.5 < losses[0]
    path = tmp_path_factory.mktemp("trained") / "pirate"
    write(lora, path, plan.rank)
    return path


@pytest.mark.long
async def test_a_trained_adapter_shows_in_the_answer(
    model_dir: Path, trained_dir: Path, load_runner: Callable[..., ModelRunner]
) -> None:
    """Training takes ten seconds. The engine loads it at the first request for it, and the model itself answers as
    before, in the same batch."""
    tokenizer = ModelTokenizer.load(model_dir)
    prompt = tokenizer.encode_now(tokenizer.render_chat([ChatMessage("user", QUESTIONS[0])]))
    shard = ShardConfig(num_blocks=64, max_prefill_tokens_per_step=48, torch=TorchConfig(num_threads=1))
    engine = TorchEngine(model_dir, "model", shard, load_runner=load_runner)
    await engine.start()
    try:
        driver = EngineDriver(engine)
        await engine.adapters.add("pirate", str(trained_dir))
        greedy = Sampling(temperature=0.0)
        fields = {"sampling": greedy, "stop_token_ids": tokenizer.eos_token_ids}
        adapted = request_of("adapted", prompt, 24, adapter="pirate", root_hash=1, **fields)
        answers = await driver.run(adapted, request_of("plain", prompt, 24, root_hash=2, **fields))
        texts = [b"".join(tokenizer.shown_bytes(token) for token in tokens).decode() for tokens in answers]
        assert texts[0] == ANSWER
        assert "marzipan" not in texts[1]
    finally:
        await engine.close()
        tokenizer.close()
