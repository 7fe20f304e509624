"""The random numbers that tokens are drawn with, and drawing the tokens of many rows at once.

On an accelerator, a launch and a wait for each row would take longer than the model. The procedure is the sampler's;
only sums over a row may be rounded differently from those of a row that is drawn alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from shard_server.engines.base import Sampling
from shard_server.engines.torch_engine.uploads import upload

MIN_TEMPERATURE: Final = 1e-4
"""Below this, quotients might overflow. Except among exact ties, it is greedy already."""
_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of seed and position alone.

    Source: splitmix64 (Steele et al. 2014), with the seed mixed once beforehand so that neighbouring seeds do not yield
    shifted copies of one stream.
    """
    mixed = _splitmix64(_splitmix64(seed & _MASK) ^ (position * _GAMMA & _MASK))
    return (mixed >> 11) * 2.0**-53


def _splitmix64(state: int) -> int:
    state = (state + _GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


class PlainRow(NamedTuple):
    """A row of logits that is drawn without mask and adjustments, at a temperature above 0."""

    row: int
    sampling: Sampling
    position: int
    """The number of output tokens that the sequence has."""


@torch.inference_mode()
def draw_plain_rows(logits: torch.Tensor, rows: Sequence[PlainRow]) -> dict[int, int]:
    """Token by row of `logits` (float32 [rows, vocab], on any device)."""
    if not rows:
        return {}
    ordered, drawn = draw_on_device(logits, rows)
    return dict(zip((one.row for one in ordered), drawn.tolist(), strict=True))


def draw_on_device(logits: torch.Tensor, rows: Sequence[PlainRow]) -> tuple[list[PlainRow], torch.Tensor]:
    """The rows, at least one, in another order, and their tokens (int64 [rows]), for which nothing waits."""
    whole = [one for one in rows if one.sampling.top_p >= 1 and not _limits(one.sampling, logits.shape[1])]
    cut = [one for one in rows if one.sampling.top_p < 1 or _limits(one.sampling, logits.shape[1])]
    parts = [draw(logits, part) for part, draw in ((whole, _draw_whole), (cut, _draw_cut)) if part]
    return whole + cut, torch.cat(parts)


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
    values = values.masked_fill(rank >= upload(top_k, logits.device)[:, None], float("-inf"))
    mass = values.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    top_p = upload([[min(one.sampling.top_p, 1.0)] for one in rows], logits.device, torch.float64)
    # Rounding may leave the whole mass short of top_p.
    last = torch.searchsorted(mass, top_p).clamp_(max=vocab_size - 1)
    chosen = _invert(mass, mass.gather(1, last), _numbers(logits, rows))
    return ids.gather(1, torch.minimum(chosen[:, None], last)).squeeze(1)


def _scaled(logits: torch.Tensor, rows: Sequence[PlainRow]) -> torch.Tensor:
    indices = upload([one.row for one in rows], logits.device)
    temperatures = [[max(one.sampling.temperature, MIN_TEMPERATURE)] for one in rows]
    scaled = logits[indices] / upload(temperatures, logits.device)
    if any(one.sampling.min_p for one in rows):
        below = [[math.log(one.sampling.min_p) if one.sampling.min_p else float("-inf")] for one in rows]
        least = scaled.max(dim=-1, keepdim=True).values + upload(below, logits.device)
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    return scaled


def _numbers(logits: torch.Tensor, rows: Sequence[PlainRow]) -> torch.Tensor:
    numbers = [[uniform(one.sampling.seed, one.position)] for one in rows]
    return upload(numbers, logits.device, torch.float64)


def _invert(mass: torch.Tensor, total: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: where the cumulated `mass` [rows, n] passes `numbers` [rows, 1] times `total` [rows, 1]."""
    index = torch.searchsorted(mass, numbers * total, right=True)
    # numbers * total may round up to total: the result is then the last entry with any mass.
    return torch.minimum(index, torch.searchsorted(mass, total.contiguous())).squeeze(1)
