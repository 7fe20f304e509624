"""Static buffers of decode steps: what a step is given is what its rows say, whatever the steps before left there."""

from __future__ import annotations

import itertools

import torch

from shard_server.engines.torch_engine.device.decode_steps import DecodeInputs, DecodeRow, DecodeSteps, step_sizes
from shard_server.engines.torch_engine.model_runner import drawn_token


def test_sizes_leave_little_padding_and_end_at_what_is_needed():
    """Every size is a recorded step: few of them, and none of which half is padding."""
    assert step_sizes(1) == [1]
    assert step_sizes(33) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 33]
    assert step_sizes(256, 128) == [128, 256]
    assert step_sizes(4, 128) == [128]
    sizes = step_sizes(256)
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(sizes))
    assert len(sizes) < 20


def test_rows_reach_the_step_and_padding_touches_no_sequences_blocks():
    """A padding row writes KV, too: into the spare block, never into a block of a sequence."""
    seen: list[DecodeInputs] = []

    def compute(inputs: DecodeInputs, _adapters: object) -> torch.Tensor:
        seen.append(inputs)
        return inputs.token_ids[:, None].float().expand(-1, 3)

    steps = DecodeSteps(
        compute,
        sizes=[2, 4],
        table_width=5,
        block_size=4,
        spare_block=99,
        vocab_size=3,
        drawn_tokens=torch.tensor([0, 21, 22]),
        device=torch.device("cpu"),
    )
    first = [DecodeRow(10 + i, 17, [1 + i, 2, 3, 4, 5 + i]) for i in range(4)]
    assert steps.run(first)[:, 0].tolist() == [10, 11, 12, 13]
    logits = steps.run([DecodeRow(7, 9, [8, 6, 4]), DecodeRow(5, 0, [3]), DecodeRow(6, 3, [2])])
    assert logits.tolist() == [[7.0] * 3, [5.0] * 3, [6.0] * 3]
    inputs = seen[-1]
    assert inputs.positions.tolist() == [9, 0, 3, 0]
    assert inputs.lengths.tolist() == [10, 1, 4, 1]
    assert inputs.slots.tolist() == [4 * 4 + 1, 12, 11, 99 * 4]
    assert inputs.tables[0, :3].tolist() == [8, 6, 4]
    assert inputs.tables[3, 0] == 99
    assert steps.run([DecodeRow(9, 4, [0, 1])]).shape == (1, 3)
    assert seen[-1].token_ids.shape == (2,)
    assert steps.run([DecodeRow(drawn_token(2), 4, [0, 1]), DecodeRow(8, 4, [2, 3])])[:, 0].tolist() == [22, 8]
