"""Draws the tokens of a step on the device that has computed it, without waiting for either.

The procedure is that of sampler.py, and so are the random numbers; only sums over a row may be rounded differently. All
that the rows need to be known on the CPU (what their guides allow, which tokens have occurred) is known by now: the
tokens of the step before have been read. So the next step can begin before these tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from shard_server.engines.base import TokenLogprobs
from shard_server.engines.torch_engine.sampling.batched_draws import PlainRow, draw_on_device
from shard_server.engines.torch_engine.sampling.sampler import LARGEST, SampleRow
from shard_server.engines.torch_engine.uploads import upload, upload_tensor

_NO_TOKEN: Final = -1
_NEVER: Final = float("-inf")


class DeviceDraws:
    """A token for each row of `logits` (float32, [rows, vocab])."""

    @torch.inference_mode()
    def __init__(self, logits: torch.Tensor, rows: Sequence[SampleRow], drawn_tokens: torch.Tensor) -> None:
        """Writes the tokens to the beginning of `drawn_tokens` (int64, on the same device) as soon as they are
        drawn."""
        self._rows = rows
        self._wants_logprobs = [index for index, row in enumerate(rows) if row.sampling.num_logprobs is not None]
        self._results: list[torch.Tensor] = []
        """In the CPU's memory, not filled before `_is_done`: the tokens, and for the rows with logprobs those of their
        tokens, the largest ones, and the ids of these."""
        if rows:
            self._draw(logits, drawn_tokens)
        self._is_done = torch.cuda.Event() if logits.device.type == "cuda" else None
        if self._is_done is not None:
            self._is_done.record()

    def read(self) -> list[tuple[int | None, TokenLogprobs | None]]:
        """Wait for the tokens, and return for each row the same as Draws.draw."""
        if self._is_done is not None:
            self._is_done.synchronize()
        if not self._results:
            return []
        token_ids, *of_logprobs = (result.tolist() for result in self._results)
        logprobs: dict[int, TokenLogprobs] = {}
        for index, own, values, ids in zip(self._wants_logprobs, *(of_logprobs or ([], [], [])), strict=True):
            num_top = self._rows[index].sampling.num_logprobs or 0
            logprobs[index] = TokenLogprobs(own, list(zip(ids[:num_top], values[:num_top], strict=True)))
        return [
            (None, None) if token_id == _NO_TOKEN else (token_id, logprobs.get(index))
            for index, token_id in enumerate(token_ids)
        ]

    def _draw(self, logits: torch.Tensor, drawn_tokens: torch.Tensor) -> None:
        largest = logits.amax(dim=-1)
        is_valid = (largest >= -LARGEST) & (largest <= LARGEST)
        drawn_from = logits
        changed = [index for index, row in enumerate(self._rows) if row.adjustments is not None or row.mask is not None]
        if changed:
            drawn_from = logits.clone()
            for index in changed:
                drawn_from[index] = _changed(logits[index], self._rows[index])
            is_valid &= drawn_from.amax(dim=-1) > _NEVER  # the mask allows a token
        token_ids = drawn_from.max(dim=-1).indices
        plain = [
            PlainRow(index, row.sampling, row.position)
            for index, row in enumerate(self._rows)
            if row.sampling.temperature > 0
        ]
        if plain:
            ordered, drawn = draw_on_device(drawn_from, plain)
            token_ids[upload([one.row for one in ordered], logits.device)] = drawn
        # The next step may compute with what was drawn from logits that are no numbers.
        token_ids = torch.where(is_valid, token_ids, 0)
        drawn_tokens[: len(token_ids)] = token_ids
        self._results = [_to_cpu(torch.where(is_valid, token_ids, _NO_TOKEN))]
        if self._wants_logprobs:
            self._add_logprobs(logits, token_ids)

    def _add_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        rows = upload(self._wants_logprobs, logits.device)
        logprobs = logits[rows].log_softmax(dim=-1)
        num_top = max(self._rows[index].sampling.num_logprobs or 0 for index in self._wants_logprobs)
        # Among equals the lower id comes first, which topk does not promise.
        ordered = logprobs.sort(dim=-1, descending=True, stable=True) if num_top else (logprobs, logprobs)
        own = logprobs.gather(1, token_ids[rows, None]).squeeze(1)
        self._results += [_to_cpu(own), *(_to_cpu(part[:, :num_top]) for part in ordered)]


def _changed(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """The logits from which the token of a row with adjustments or a mask is drawn."""
    allowed = None if row.mask is None else _allowed(row.mask, logits)
    adjustments = row.adjustments
    if adjustments is None:
        return _masked(logits, allowed)
    adjusted = _masked(adjustments.apply(logits, row.position), allowed)
    if allowed is None or not adjustments.forbids_stops(row.position):
        return adjusted
    # The guide may allow only stop tokens, and has precedence.
    with_stops = _masked(adjustments.apply(logits, row.position, may_stop=True), allowed)
    return torch.where(adjusted.amax() > _NEVER, adjusted, with_stops)


def _masked(logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    return logits if allowed is None else logits.where(allowed, _NEVER)


def _allowed(mask: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    """bool [vocab]; the mask may be overwritten after this."""
    bits = np.unpackbits(mask, bitorder="little", count=len(logits))
    return upload_tensor(torch.from_numpy(bits), logits.device).bool()


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that the device makes once it has computed the tensor."""
    return tensor.to("cpu", non_blocking=True)
