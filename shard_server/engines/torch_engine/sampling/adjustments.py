"""LogitAdjustments changes for a request the logits from which a token is drawn: bias, stop tokens that come too early,
and penalties for tokens that have occurred.

Every operation works on single logits, so the result depends neither on the batch nor on the number of threads. It
depends only on the request and on the tokens so far, so a sequence that is preempted or resumed elsewhere continues
identically.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shard_server.engines.base import EngineRequest
from shard_server.engines.torch_engine.uploads import upload

_NEVER = float("-inf")


class LogitAdjustments:
    """The adjustments of one sequence, and the counts of its tokens that they need."""

    __slots__ = ("_bias", "_bias_ids", "_counts", "_min_tokens", "_sampling", "_seen", "_seen_ids", "_stop_ids")

    def __init__(self, request: EngineRequest) -> None:
        """Counts the output tokens of earlier attempts."""
        self._sampling = sampling = request.sampling
        self._bias_ids = [token_id for token_id, _ in sampling.logit_bias]
        self._bias = [bias for _, bias in sampling.logit_bias]
        self._min_tokens = request.min_tokens if request.stop_token_ids else 0
        self._stop_ids = sorted(request.stop_token_ids)
        self._counts: dict[int, int] | None = None
        """How often each token occurs in the output; None without penalties."""
        self._seen: dict[int, None] | None = None
        """The tokens of prompt and output, in the order of their first occurrence; None without repetition penalty."""
        self._seen_ids = torch.empty(0, dtype=torch.int64)
        """The same, up to the last token that was drawn."""
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = {}
        if sampling.repetition_penalty != 1:
            self._seen = dict.fromkeys(request.prompt_token_ids)
        for token_id in request.output_token_ids:
            self.count(token_id)

    @classmethod
    def of(cls, request: EngineRequest) -> LogitAdjustments | None:
        """None for a request that changes no logits, as most."""
        sampling = request.sampling
        changes = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
        return cls(request) if changes or sampling.logit_bias or request.min_tokens else None

    def count(self, token_id: int) -> None:
        """A token was appended to the output."""
        if self._counts is not None:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
        if self._seen is not None:
            self._seen[token_id] = None

    def forbids_stops(self, position: int) -> bool:
        """True when the output token with this index must not be a stop token."""
        return position < self._min_tokens

    def apply(self, logits: torch.Tensor, position: int, *, may_stop: bool = False) -> torch.Tensor:
        """The logits [vocab] that the output token with index `position` is drawn from, as a new tensor. `may_stop`:
        leave stop tokens as they are."""
        logits = logits.clone()
        if self._bias_ids:
            logits.index_add_(0, _ids(self._bias_ids, logits), upload(self._bias, logits.device))
        if self._seen:
            if len(self._seen_ids) < len(self._seen):
                self._seen_ids = _ids(list(self._seen), logits)
            seen, penalty = logits[self._seen_ids], self._sampling.repetition_penalty
            logits[self._seen_ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts:
            counts = upload(list(self._counts.values()), logits.device, torch.float32)
            penalty = self._sampling.frequency_penalty * counts + self._sampling.presence_penalty
            logits.index_add_(0, _ids(list(self._counts), logits), -penalty)
        if self.forbids_stops(position) and not may_stop:
            known = [token_id for token_id in self._stop_ids if token_id < len(logits)]
            logits[_ids(known, logits)] = _NEVER
        return logits


def _ids(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return upload(token_ids, logits.device, torch.int64)
