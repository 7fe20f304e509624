"""LoRA adapters of the torch engine: exact in every batch, and what merged weights compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shard_server.engines.torch_engine.lora.peft import read_adapter
from shard_server.engines.torch_engine.model_runner import ModelRunner, ScheduledSequence
from tests.fakes.peft_adapter import write_merged_model, write_peft_adapter
from tests.fakes.shallow_model import write_shallow_model

BLOCK_SIZE = 16
BLOCKS_EACH = 8
PROMPTS = [
    torch.randint(3, 49152, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (37, 5, 64, 70, 1, 16)
]
KINDS: dict[str, dict[str, Any]] = {
    "compiled": {"dtype": "bfloat16"},
    "compiled int8": {"dtype": "bfloat16", "weights": "int8"},
    "torch bf16": {"dtype": "bfloat16", "kernels": "torch"},
    "torch float32": {"dtype": "float32"},
    "torch int8": {"dtype": "float32", "weights": "int8", "kernels": "torch"},
}


def load(model_dir: Path, options: dict[str, Any]) -> ModelRunner:
    sizes = {"block_size": BLOCK_SIZE, "num_blocks": 96, "max_model_len": 512, "num_threads": 1}
    return ModelRunner(model_dir, **sizes, **options)


@pytest.fixture(scope="module")
def shallow_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shallow_model(model_dir, tmp_path_factory.mktemp("models") / "shallow", num_layers=3)


@pytest.fixture(scope="module")
def adapter_dirs(shallow_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of all modules, and of the usual two with another rank."""
    folder = tmp_path_factory.mktemp("adapters")
    return [
        write_peft_adapter(shallow_dir, folder / "all", rank=8, seed=1),
        write_peft_adapter(shallow_dir, folder / "two", rank=5, modules=["q_proj", "v_proj"], seed=2, size=0.3),
    ]


class Bench:
    def __init__(self, runner: ModelRunner, adapter_dirs: list[Path], options: dict[str, Any]) -> None:
        self.runner, self.options = runner, options
        weights = [read_adapter(path, runner.config, max_rank=64) for path in adapter_dirs]
        self.adapters: list[Any] = [None, *(runner.adapter(own) for own in weights)]

    def scheduled(self, index: int, start: int, end: int) -> ScheduledSequence:
        """Tokens of a prompt; which adapter it has follows from its place."""
        table = range(index * BLOCKS_EACH, (index + 1) * BLOCKS_EACH)
        tokens = PROMPTS[index][start:end]
        adapter = self.adapters[index % len(self.adapters)]
        return ScheduledSequence(tokens, start, table, wants_logits=end == len(PROMPTS[index]), adapter=adapter)

    def whole(self, index: int) -> ScheduledSequence:
        return self.scheduled(index, 0, len(PROMPTS[index]))


@pytest.fixture(scope="module", params=list(KINDS))
def bench(request: pytest.FixtureRequest, shallow_dir: Path, adapter_dirs: list[Path]) -> Bench:
    runner = load(shallow_dir, KINDS[request.param])
    if not runner.batch_invariant:
        pytest.skip("this machine's kernels are not batch invariant, and the engine does not promise it here")
    return Bench(runner, adapter_dirs, KINDS[request.param])


def test_a_sequence_has_the_same_bits_alone_and_in_a_mixed_batch(bench: Bench) -> None:
    """Two adapters and the model itself in one batch, as whole prompts and cut into chunks and single tokens."""
    alone = [bench.runner.run([bench.whole(index)]).clone() for index in range(len(PROMPTS))]
    together = bench.runner.run([bench.whole(index) for index in range(len(PROMPTS))])
    assert torch.equal(together, torch.cat(alone))
    for index, prompt in enumerate(PROMPTS):
        others = [bench.whole(other) for other in range(len(PROMPTS)) if other not in (index, 4)]
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
    shallow_dir: Path,
    adapter_dirs: list[Path],
    number: int,
    tmp_path: Path,
) -> None:
    """Merging is what the adapter means; it rounds the sums of weights where we round the sums of products."""
    merged_dir = write_merged_model(shallow_dir, adapter_dirs[number], tmp_path / "merged")
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
