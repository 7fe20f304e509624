"""Draws tokens so that a row's outcome depends on that row alone: not on the batch, the step or the timing.

The random number for an output position is a function of (seed, position) only, and every operation on logits works on
one row, in an order that neither the number of rows nor the number of threads changes (this holds for softmax,
log-softmax and cumsum over the last dimension, but not for sums and logsumexp). So a sequence that is batched
differently, preempted or resumed elsewhere draws the same tokens, bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch

from shard_server.engines.base import EngineRequest, Sampling, TokenLogprobs
from shard_server.engines.torch_engine.sampling.adjustments import LogitAdjustments
from shard_server.engines.torch_engine.sampling.batched_draws import MIN_TEMPERATURE, PlainRow, draw_plain_rows, uniform


@dataclasses.dataclass(slots=True)
class SampleRow:
    """How a token is to be drawn from one row of logits."""

    sampling: Sampling
    position: int
    """The number of output tokens of the sequence, which is the index of the one to draw."""
    adjustments: LogitAdjustments | None = None
    """The changes of the logits before a token is drawn; None: nothing is changed."""
    mask: np.ndarray | None = None
    """uint8 [at least vocab / 8], a bit per token, lowest first: only tokens whose bit is 1 are drawn. None: all."""


class Draws:
    """Tokens drawn from the rows of `logits` (float32, [rows, vocab]), row by row: a mask, then the request's
    adjustments, temperature, min_p, top_k, top_p. Log-probabilities are those of the raw logits."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[int] | None = None) -> None:
        """`rows`: those that tokens may be drawn from; None: all."""
        self._logits = logits
        self._drawn: dict[int, int] = {}
        """By row: tokens that were drawn beforehand."""
        # Ties go to the lowest id: torch's max returns the first.
        best, best_ids = (logits if rows is None else logits[rows]).max(dim=-1)
        places = range(len(logits)) if rows is None else rows
        self._best: dict[int, float] = dict(zip(places, best.tolist(), strict=True))
        self._best_ids: dict[int, int] = dict(zip(places, best_ids.tolist(), strict=True))

    @property
    def wants_rows_together(self) -> bool:
        """True when waiting for every single row would be expensive, because the logits are not in the CPU's memory."""
        return self._logits.device.type != "cpu"

    def draw_together(self, rows: Sequence[PlainRow]) -> None:
        """Draw the tokens of `rows` beforehand, all at once; `draw` then returns them."""
        self._drawn = draw_plain_rows(self._logits, rows)

    @torch.inference_mode()
    def draw(self, index: int, row: SampleRow) -> tuple[int | None, TokenLogprobs | None]:
        """A token of row `index`, and its logprobs if they were requested. No token if the logits are not finite or the
        mask allows none."""
        sampling = row.sampling
        if not -LARGEST <= self._best[index] <= LARGEST:
            return None, None
        logits = self._logits[index]
        token_id = self._drawn.get(index, self._best_ids[index])
        if row.mask is not None:
            chosen = _draw_masked(logits, row, row.mask)
            if chosen is None:
                return None, None
            token_id = chosen
        elif row.adjustments is not None:
            token_id = _draw(row.adjustments.apply(logits, row.position), sampling, row.position)
        elif index not in self._drawn and sampling.temperature > 0:
            token_id = _draw(logits, sampling, row.position)
        if sampling.num_logprobs is None:
            return token_id, None
        return token_id, _logprobs(logits, token_id, sampling.num_logprobs)

    @torch.inference_mode()
    def logprobs(self, index: int, token_id: int, num_top: int) -> TokenLogprobs:
        """The logprob of a token that was not drawn, and those of the likeliest ones, by row `index`."""
        return _logprobs(self._logits[index], token_id, num_top)


def draw_in_all_ways(logits: torch.Tensor) -> None:
    """Draw from the first row with every parameter: a device loads what an operation needs at its first use, for which
    no request shall wait."""
    draws = Draws(logits)
    draws.draw_together([PlainRow(0, row.sampling, 0) for row in all_kinds_of_rows(logits.shape[1])])
    for row in all_kinds_of_rows(logits.shape[1]):
        draws.draw(0, row)


def all_kinds_of_rows(vocab_size: int) -> list[SampleRow]:
    """Rows that use every parameter."""
    cut = {"top_k": 2, "top_p": 0.9, "min_p": 0.1}
    changed = Sampling(presence_penalty=1.0, repetition_penalty=2.0, logit_bias=((0, 1.0),), num_logprobs=1, **cut)
    request = EngineRequest("", [0], changed, 2, frozenset({0}), min_tokens=2, output_token_ids=[0])
    adjustments = LogitAdjustments(request)
    mask = np.full(-(-vocab_size // 8), 255, np.uint8)
    plain = [SampleRow(Sampling(), 0), SampleRow(Sampling(**cut), 0)]
    return [*plain, SampleRow(changed, 1, adjustments), SampleRow(changed, 1, adjustments, mask)]


LARGEST = torch.finfo(torch.float32).max
"""A row whose largest logit is larger, or no number, is not finite."""
_USUAL_FLOOR = 1e-3


def _draw_masked(logits: torch.Tensor, row: SampleRow, mask: np.ndarray) -> int | None:
    """One of the tokens that the mask allows; None if it allows none.

    Uses numpy, which takes microseconds, while torch would wake its threads for every operation on a row; and works
    only on the allowed tokens, mostly a small part of the vocabulary.
    """
    candidates = np.flatnonzero(np.unpackbits(mask, bitorder="little", count=len(logits)))
    if not len(candidates):
        return None
    adjustments = row.adjustments
    if adjustments is not None:
        adjusted = adjustments.apply(logits, row.position).cpu().numpy()[candidates]
        if adjusted.max() == -math.inf:  # the guide allows only stop tokens, and has precedence
            adjusted = adjustments.apply(logits, row.position, may_stop=True).cpu().numpy()[candidates]
        values = adjusted
    else:
        values = logits.cpu().numpy()[candidates]
    if row.sampling.temperature == 0:
        return int(candidates[values.argmax()])  # the first among equals, as everywhere
    return int(candidates[_draw(torch.from_numpy(values), row.sampling, row.position)])


def _draw(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """One token from a row [vocab]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    number = uniform(sampling.seed, position)
    candidates = None
    if 0 < sampling.top_k < len(logits):
        values, candidates = _largest(logits, sampling.top_k)
    else:
        values = logits
    values = values / max(sampling.temperature, MIN_TEMPERATURE)
    if sampling.min_p > 0:
        likely = (values >= values.max() + math.log(sampling.min_p)).nonzero().squeeze(-1)
        values, candidates = values[likely], likely if candidates is None else candidates[likely]
    probs = values.softmax(dim=-1)
    if sampling.top_p < 1:
        probs, ids = _nucleus(probs, sampling.top_p)
        candidates = ids if candidates is None else candidates[ids]
    index = _invert(probs, number)
    return index if candidates is None else int(candidates[index])


def _largest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values, largest first; among equals, the lower index first (topk promises no order among equals).

    Returns values [k] and their indices [k].
    """
    threshold = values.topk(k).values[-1]
    indices = (values >= threshold).nonzero().squeeze(-1)
    ordered, order = values[indices].sort(descending=True, stable=True)
    return ordered[:k], indices[order[:k]]


def _nucleus(probs: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest of the likeliest tokens that together reach `top_p`: probabilities, likeliest first, and indices.

    Sorting the vocabulary costs milliseconds, so only what can be in the nucleus is sorted. Tokens less likely than
    (1 - top_p) / vocab cannot amount to 1 - top_p all together, so the nucleus needs none of them (half of that bound
    leaves room for rounding); mostly a far higher floor holds it already. Whatever the floor, the result is the same.
    """
    for floor in (_USUAL_FLOOR, 0.5 * (1 - top_p) / len(probs)):
        indices = (probs >= floor).nonzero().squeeze(-1)
        ordered, order = probs[indices].sort(descending=True, stable=True)
        mass = ordered.cumsum(dim=-1, dtype=torch.float64)
        size = int(torch.searchsorted(mass, top_p)) + 1
        if size <= len(indices):
            break
    return ordered[:size], indices[order[:size]]


def _invert(probs: torch.Tensor, number: float) -> int:
    """The index at which the cumulated probability passes `number` times the total."""
    mass = probs.cumsum(dim=-1, dtype=torch.float64)
    total = float(mass[-1])
    index = int(torch.searchsorted(mass, number * total, right=True))
    # number * total may round up to total: the result is then the last entry with any mass.
    return index if index < len(probs) else int(torch.searchsorted(mass, total))


def _logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    logprobs = logits.log_softmax(dim=-1)
    top: list[tuple[int, float]] = []
    if num_top:
        values, ids = _largest(logprobs, min(num_top, len(logprobs)))
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(logprobs[token_id]), top)
