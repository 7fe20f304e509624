"""Speculation by prompt lookup: what followed the last tokens the last time they occurred may follow them again.

Source: Saxena, Prompt Lookup Decoding (2023), a case of speculative decoding (Leviathan et al., arXiv:2211.17192). Here
a draft is kept exactly while it equals the token that is drawn anyway, a function of seed, position and logits: so
speculation changes when tokens come, never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_STEP_ROWS: Final = 32
"""Of decoding sequences and their drafts together: a matrix product of up to so many rows takes hardly longer than one
of a few (see linear.py)."""
_MIN_NGRAM: Final = 2
"""A single token has occurred before nearly always, and predicts nearly nothing."""


class PromptLookup:
    """Drafts for one sequence, from its own tokens."""

    __slots__ = ("_allowance", "_max_draft_tokens", "_num_indexed", "_places", "_sizes")

    def __init__(self, max_draft_tokens: int, max_ngram: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._allowance = max_draft_tokens
        """Tokens in the next draft at most: fewer after misses."""
        self._sizes = range(max_ngram, min(_MIN_NGRAM, max_ngram) - 1, -1)
        self._places: dict[tuple[int, ...], int] = {}
        """Where n-grams last ended, which is where what followed them begins."""
        self._num_indexed = 0

    def draft(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that may follow. `token_ids` begins with what it was at the call before."""
        self._index(token_ids)
        limit = min(limit, self._allowance)
        if limit < 1:
            return []
        for size in self._sizes:
            place = self._places.get(tuple(token_ids[-size:]))
            if place is not None:
                return _following(token_ids, place, limit)
        return []

    def on_verified(self, num_drafted: int, num_accepted: int) -> None:
        """What became of the last draft."""
        if num_accepted == num_drafted:
            self._allowance = min(self._max_draft_tokens, max(2 * self._allowance, 1))
        else:
            self._allowance = max(num_accepted, 1)

    def _index(self, token_ids: Sequence[int]) -> None:
        """All n-grams that something follows: not the last ones, which are what is looked up."""
        for size in self._sizes:
            for end in range(max(self._num_indexed, size), len(token_ids)):
                self._places[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(len(token_ids), self._num_indexed)


def _following(token_ids: Sequence[int], place: int, limit: int) -> list[int]:
    """The tokens from `place` on; behind the last one the repetition goes on."""
    draft = list(token_ids[place : place + limit])
    period = len(token_ids) - place
    while len(draft) < limit:
        draft.append(draft[len(draft) - period])
    return draft
