"""Drafts from the answer that the client expects, for example a text of which only a few words will change.

The answer is followed in the prediction token by token. Where it deviates, the place at which it returns to the
prediction is found by its last tokens. As with prompt lookup, a draft is kept exactly while it equals the token that is
drawn anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shard_server.engines.torch_engine.sampling.speculation import MAX_STEP_ROWS

_NUM_TAIL_TOKENS: Final = 2
"""How many of the last tokens must occur in the prediction for the answer to continue there."""
_MAX_PLACES: Final = 64
"""How many places are compared in one search: a common token may occur everywhere."""


class PredictedAnswer:
    """Drafts for one sequence, from its prediction. `num_drafts` and `num_accepted` count its tokens from the start."""

    __slots__ = (
        "_allowance",
        "_left_at",
        "_max_draft_tokens",
        "_num_followed",
        "_place",
        "_predicted",
        "num_accepted",
        "num_drafts",
    )

    def __init__(self, predicted: Sequence[int], max_draft_tokens: int) -> None:
        self._predicted = list(predicted)
        self._max_draft_tokens = max_draft_tokens
        self._allowance = max_draft_tokens
        """The largest number of tokens in the next draft; smaller after misses."""
        self._place: int | None = 0
        """The index of the token that comes next if the answer follows the prediction; None while it does not."""
        self._left_at = 0
        """The last place at which the answer followed the prediction: it is expected to return after it."""
        self._num_followed = 0
        """The number of output tokens that `_place` takes into account."""
        self.num_drafts = 0
        self.num_accepted = 0

    def draft(self, token_ids: Sequence[int], num_output_tokens: int, limit: int) -> list[int]:
        """Up to `limit` tokens that may follow. The output is the last `num_output_tokens` of `token_ids`, and extends
        that of the previous call."""
        self._follow(token_ids[len(token_ids) - (num_output_tokens - self._num_followed) :])
        if self._place is None:
            tail = list(token_ids[-min(_NUM_TAIL_TOKENS, num_output_tokens) :])
            self._place = self._find(tail, self._left_at) or self._find(tail, 0)
        if self._place is None:
            return []
        return self._predicted[self._place : self._place + min(limit, self._allowance)]

    def on_verified(self, num_drafts: int, num_accepted: int) -> None:
        """Adapt to how many tokens of the last draft were accepted."""
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        if num_accepted == num_drafts:
            self._allowance = min(MAX_STEP_ROWS, 2 * self._allowance)
        else:
            self._allowance = min(self._max_draft_tokens, max(num_accepted, 2))

    def _follow(self, new_token_ids: Sequence[int]) -> None:
        for token_id in new_token_ids:
            place = self._place
            if place is not None:
                follows = place < len(self._predicted) and self._predicted[place] == token_id
                self._place = place + 1 if follows else None
                self._left_at = place
        self._num_followed += len(new_token_ids)

    def _find(self, tail: list[int], start: int) -> int | None:
        """The place after the first occurrence of these tokens that ends at or after `start`."""
        predicted, size = self._predicted, len(tail)
        if not size:
            return None
        index = start - 1
        for _ in range(_MAX_PLACES):
            try:
                index = predicted.index(tail[-1], index + 1)
            except ValueError:
                return None
            if predicted[max(0, index - size + 1) : index + 1] == tail:
                return index + 1
        return None
