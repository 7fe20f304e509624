"""Rows drawn together on an accelerator get the tokens that they get one by one."""

from __future__ import annotations

import pytest
import torch

from shard_server.engines.base import Sampling
from shard_server.engines.torch_engine.sampling.batched_draws import PlainRow, draw_plain_rows
from shard_server.engines.torch_engine.sampling.sampler import Draws, SampleRow

SAMPLINGS = [
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.7, seed=2**63 + 5),
    Sampling(temperature=0.8, top_p=0.9, seed=4),
    Sampling(temperature=1.0, top_p=1e-9, seed=5),
    Sampling(temperature=1.2, top_k=7, seed=6),
    Sampling(temperature=1.0, top_k=40, top_p=0.5, seed=7),
    Sampling(temperature=1e-9, seed=8),
    Sampling(temperature=0.6, top_k=100_000, top_p=0.999, seed=9),
    Sampling(temperature=0.9, min_p=0.08, seed=10),
    Sampling(temperature=1.4, min_p=0.01, top_k=30, top_p=0.9, seed=11),
]


@pytest.mark.parametrize("scale", [0.01, 3.0, 40.0])
def test_rows_together_get_the_tokens_of_rows_alone(scale: float):
    """The same numbers, the same order of candidates: an answer continues alike on either machine."""
    logits = torch.randn(200, 3000, generator=torch.Generator().manual_seed(1)) * scale
    rows = [PlainRow(row, SAMPLINGS[row % len(SAMPLINGS)], row // 3) for row in range(200) if row % 11]
    expected = {one.row: Draws(logits).draw(one.row, SampleRow(one.sampling, one.position))[0] for one in rows[:88]}
    drawn = draw_plain_rows(logits, rows)
    assert drawn.keys() == {one.row for one in rows}
    assert {row: drawn[row] for row in expected} == expected


def test_what_was_drawn_together_is_what_draw_gives():
    """Greedy rows, and those with penalties or masks, are still drawn by themselves."""
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2))
    alone = Draws(logits)
    together = Draws(logits)
    sampling = Sampling(temperature=1.5, seed=1)
    together.draw_together([PlainRow(1, sampling, 4)])
    for row, (chosen, position) in enumerate([(Sampling(temperature=0.0), 0), (sampling, 4), (sampling, 5)]):
        sample = SampleRow(chosen, position)
        assert together.draw(row, sample) == alone.draw(row, sample)


def test_no_rows_are_no_work():
    """A step of greedy sequences only."""
    assert draw_plain_rows(torch.zeros(2, 10), []) == {}
