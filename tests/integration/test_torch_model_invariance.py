"""A sequence's logits are bit for bit the same alone or in a batch, in any chunks, on reused KV. Failover relies on
it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from lab.shallow_model import write_shallow_model
from shard_server.engines.torch_engine.model_runner import ModelRunner, ScheduledSequence
from tests.fakes.kernel_threads import family_params

pytestmark = pytest.mark.timeout(400)
"""CPUs without bf16 arithmetic take two minutes for one of these tests."""

NUM_LAYERS = 2
NUM_BLOCKS = 400
BLOCKS_PER_SEQUENCE = 48


@pytest.fixture(scope="module")
def shallow_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layers have the same shapes, so that two show what thirty do."""
    return write_shallow_model(model_dir, tmp_path_factory.mktemp("shallow") / "model", NUM_LAYERS)


RUNNERS = [
    *family_params(),
    "int8",
    *(pytest.param(kind, marks=pytest.mark.long) for kind in ("int8 in float32", "torch's operators")),
]


@pytest.fixture(scope="module", params=RUNNERS)
def runner(shallow_dir: Path, request: pytest.FixtureRequest) -> ModelRunner:
    kernels: dict[str, str] = {"int8": "auto", "int8 in float32": "generic", "torch's operators": "torch"}
    return ModelRunner(
        shallow_dir,
        dtype="bfloat16",
        block_size=16,
        num_blocks=NUM_BLOCKS,
        max_model_len=0,
        num_threads=1,
        weights="int8" if "int8" in request.param else "dtype",
        kernels=str(kernels.get(request.param, request.param)),
    )


class PagedSequence:
    """Returns token ids and a random block table."""

    def __init__(self, seed: int, num_tokens: int, blocks: list[int]) -> None:
        chooser = random.Random(seed)
        self.token_ids = [chooser.randrange(49152) for _ in range(num_tokens)]
        self.block_table = blocks

    def part(self, start: int, end: int) -> ScheduledSequence:
        return ScheduledSequence(self.token_ids[start:end], start, self.block_table, True)

    def whole(self) -> ScheduledSequence:
        return self.part(0, len(self.token_ids))


def scattered_blocks(count: int) -> list[list[int]]:
    blocks = list(range(NUM_BLOCKS))
    random.Random(5).shuffle(blocks)
    return [blocks[index * BLOCKS_PER_SEQUENCE : (index + 1) * BLOCKS_PER_SEQUENCE] for index in range(count)]


def test_this_machine_was_found_invariant(runner: ModelRunner):
    """The other tests apply where the engine claims invariance, and on our test machines it must claim it."""
    assert runner.batch_invariant


@pytest.mark.parametrize(
    "chunk",
    [1, pytest.param(5, marks=pytest.mark.long), 31, pytest.param(129, marks=pytest.mark.long), 333],
)
def test_prefill_in_chunks_gives_the_bits_of_prefill_in_one(runner: ModelRunner, chunk: int):
    """Chunk borders depend on the other requests. Chunks of 1 are decoding: a resumed sequence prefills what the lost
    one decoded."""
    num_tokens = 530 if chunk >= 100 else 45
    first, second, *_ = scattered_blocks(2)
    whole, chunked = PagedSequence(1, num_tokens, first), PagedSequence(1, num_tokens, second)
    expected = runner.run([whole.whole()])
    ends = [min(start + chunk, num_tokens) for start in range(0, num_tokens, chunk)]
    logits = [runner.run([chunked.part(start, end)]) for start, end in itertools.pairwise([0, *ends])]
    assert torch.equal(logits[-1], expected)


def test_every_decoded_position_has_the_bits_of_its_prefill(runner: ModelRunner):
    """The lengths lie around the borders of blocks and of the kernel's 512 keys."""
    blocks = scattered_blocks(2)
    sequence, prefix = PagedSequence(2, 530, blocks[0]), PagedSequence(2, 530, blocks[1])
    runner.run([sequence.part(0, 509)])
    for position in range(509, 529):
        decoded = runner.run([sequence.part(position, position + 1)])
        if position in (511, 512, 513, 528):
            assert torch.equal(decoded, runner.run([prefix.part(0, position + 1)])), position


def test_a_batch_of_everything_gives_each_the_bits_it_has_alone(runner: ModelRunner):
    """One step has prefills, chunks and decodes of ragged lengths, in any order."""
    lengths = [5, 17, 64, 200, 301, 513, 600]
    sequences = [
        PagedSequence(seed, n, table) for seed, (n, table) in enumerate(zip(lengths, scattered_blocks(7), strict=True))
    ]
    alone = torch.cat([runner.run([sequence.whole()]) for sequence in sequences])
    # KV of all but the last tokens is reused from here on.
    chooser = random.Random(3)
    for _ in range(3):
        order = chooser.sample(range(len(sequences)), chooser.randint(1, len(sequences)))
        starts = {index: lengths[index] - chooser.choice([1, 1, 2, 4, lengths[index] // 2 + 1]) for index in order}
        batch = [sequences[index].part(starts[index], lengths[index]) for index in order]
        assert torch.equal(runner.run(batch), alone[order])


@pytest.mark.parametrize(
    "num_sequences", [3, 32, 64, *(pytest.param(number, marks=pytest.mark.long) for number in (2, 7, 31, 33))]
)
def test_decoding_does_not_depend_on_the_number_of_sequences(runner: ModelRunner, num_sequences: int):
    """Matrix libraries choose their kernels by the number of rows."""
    sequences = [PagedSequence(9, 24 + seed, [seed * 6 + block for block in range(6)]) for seed in range(num_sequences)]
    for sequence in sequences[:2]:
        runner.run([sequence.part(0, len(sequence.token_ids) - 1)])
    decodes = [sequence.part(len(sequence.token_ids) - 1, len(sequence.token_ids)) for sequence in sequences]
    alone = torch.cat([runner.run([decode]) for decode in decodes[:2]])
    assert torch.equal(runner.run(decodes)[:2], alone)


def test_only_sequences_that_want_logits_get_them(runner: ModelRunner):
    """The output head is a fifth of the work, and a chunk in the middle of a prompt does not need it."""
    first, second, third = (PagedSequence(seed, 20, table) for seed, table in enumerate(scattered_blocks(3)))
    expected = runner.run([third.whole()])
    middle = ScheduledSequence(first.token_ids, 0, first.block_table, False)
    logits = runner.run([middle, third.whole(), ScheduledSequence(second.token_ids[:1], 0, second.block_table, False)])
    assert logits.dtype == torch.float32
    assert torch.equal(logits, expected)
    assert runner.run([middle]).shape == (0, runner.vocab_size)


def test_float32_and_uneven_blocks_are_invariant_too(shallow_dir: Path):
    """float32 is the reference mode, and a block size that divides nothing reveals hidden assumptions."""
    runner = ModelRunner(shallow_dir, dtype="float32", block_size=5, num_blocks=80, max_model_len=200, num_threads=1)
    assert runner.batch_invariant
    blocks = list(range(80))
    random.Random(6).shuffle(blocks)
    sequences = [PagedSequence(seed, n, blocks[seed * 16 : (seed + 1) * 16]) for seed, n in enumerate([9, 50, 77])]
    alone = torch.cat([runner.run([sequence.whole()]) for sequence in sequences])
    parts = [
        sequence.part(len(sequence.token_ids) - n, len(sequence.token_ids))
        for sequence, n in zip(sequences, [1, 1, 7], strict=True)
    ]
    assert torch.equal(runner.run(parts), alone)
