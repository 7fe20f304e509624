"""Draws many rows' tokens at once: on an accelerator a launch and a wait for each row would take longer than the
model.

The numbers are those of numbers.py, and the procedure is the sampler's; only sums over a row may be rounded otherwise
than where a row is drawn by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shard_server.engines.base import Sampling
from shard_server.engines.torch_engine.numbers import MIN_TEMPERATURE, uniform


class PlainRow(NamedTuple):
    """A row of logits that is drawn without mask and penalties, at a temperature above 0."""

    row: int
    sampling: Sampling
    position: int
    """How many output tokens the sequence has."""


@torch.inference_mode()
def draw_plain_rows(logits: torch.Tensor, rows: Sequence[PlainRow]) -> dict[int, int]:
    """Token by row of `logits` (float32 [rows, vocab], on any device)."""
    tokens: dict[int, int] = {}
    whole = [one for one in rows if one.sampling.top_p >= 1 and not _limits(one.sampling, logits.shape[1])]
    cut = [one for one in rows if one.sampling.top_p < 1 or _limits(one.sampling, logits.shape[1])]
    for part, draw in ((whole, _draw_whole), (cut, _draw_cut)):
        if part:
            drawn = draw(logits, part)
            tokens |= zip((one.row for one in part), drawn.tolist(), strict=True)
    return tokens


def _limits(sampling: Sampling, vocab_size: int) -> bool:
    return 0 < sampling.top_k < vocab_size


def _draw_whole(logits: torch.Tensor, rows: Sequence[PlainRow]) -> torch.Tensor:
    probs = _scaled(logits, rows).softmax(dim=-1)
    mass = probs.cumsum(dim=-1, dtype=torch.float64)
    return _invert(mass, mass[:, -1:], _numbers(logits, rows))


def _draw_cut(logits: torch.Tensor, rows: Sequence[PlainRow]) -> torch.Tensor:
    vocab_size = logits.shape[1]
    values, ids = _scaled(logits, rows).sort(dim=-1, descending=True, stable=True)
    top_k = [one.sampling.top_k if _limits(one.sampling, vocab_size) else vocab_size for one in rows]
    rank = torch.arange(vocab_size, device=logits.device)
    values = values.masked_fill(rank >= torch.tensor(top_k, device=logits.device)[:, None], float("-inf"))
    mass = values.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    top_p = torch.tensor([[min(one.sampling.top_p, 1.0)] for one in rows], dtype=torch.float64, device=logits.device)
    # Rounding may leave the whole mass short of top_p.
    last = torch.searchsorted(mass, top_p).clamp_(max=vocab_size - 1)
    chosen = _invert(mass, mass.gather(1, last), _numbers(logits, rows))
    return ids.gather(1, torch.minimum(chosen[:, None], last)).squeeze(1)


def _scaled(logits: torch.Tensor, rows: Sequence[PlainRow]) -> torch.Tensor:
    indices = torch.tensor([one.row for one in rows], device=logits.device)
    temperatures = [[max(one.sampling.temperature, MIN_TEMPERATURE)] for one in rows]
    return logits[indices] / torch.tensor(temperatures, device=logits.device)


def _numbers(logits: torch.Tensor, rows: Sequence[PlainRow]) -> torch.Tensor:
    numbers = [[uniform(one.sampling.seed, one.position)] for one in rows]
    return torch.tensor(numbers, dtype=torch.float64, device=logits.device)


def _invert(mass: torch.Tensor, total: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: where the cumulated `mass` [rows, n] passes `numbers` [rows, 1] times `total` [rows, 1]."""
    index = torch.searchsorted(mass, numbers * total, right=True)
    # numbers * total may round up to total: then it is the last that has any mass.
    return torch.minimum(index, torch.searchsorted(mass, total.contiguous())).squeeze(1)
