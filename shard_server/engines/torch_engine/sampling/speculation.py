"""Speculation by prompt lookup: what followed the last tokens the last time they occurred may follow them again.

Source: Saxena, Prompt Lookup Decoding (2023), a case of speculative decoding (Leviathan et al., arXiv:2211.17192). Here
a draft is kept exactly while it equals the token that is drawn anyway, a function of seed, position and logits: so
speculation changes when tokens come, never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_STEP_ROWS: Final = 32
"""The limit for decoding sequences and their drafts together: a matrix product of up to this many rows takes hardly
longer than one of a few rows (see linear.py)."""
MAX_NGRAM: Final = 3
"""The longest run of last tokens that is searched for: longer ones are found as often, and cost more."""
_MIN_NGRAM: Final = 2
"""A single token has nearly always occurred before, and predicts almost nothing."""


class PromptLookup:
    """Drafts for one sequence, from its own tokens."""

    __slots__ = ("_allowance", "_max_draft_tokens", "_num_indexed", "_places", "_sizes")

    def __init__(self, max_draft_tokens: int, max_ngram: int = MAX_NGRAM) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._allowance = max_draft_tokens
        """The largest number of tokens in the next draft; smaller after misses."""
        self._sizes = range(max_ngram, min(_MIN_NGRAM, max_ngram) - 1, -1)
        self._places: dict[tuple[int, ...], int] = {}
        """By n-gram: the index after its last occurrence, where its continuation begins."""
        self._num_indexed = 0

    def draft(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that may follow. `token_ids` must extend those of the previous call."""
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
        """Adapt to how many tokens of the last draft were accepted."""
        if num_accepted == num_drafted:
            self._allowance = min(self._max_draft_tokens, max(2 * self._allowance, 1))
        else:
            self._allowance = max(num_accepted, 1)

    def _index(self, token_ids: Sequence[int]) -> None:
        """Index all n-grams that have a continuation: not the last ones, which are looked up."""
        for size in self._sizes:
            for end in range(max(self._num_indexed, size), len(token_ids)):
                self._places[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(len(token_ids), self._num_indexed)


def _following(token_ids: Sequence[int], place: int, limit: int) -> list[int]:
    """The tokens from `place` on; after the last token, the repetition continues."""
    draft = list(token_ids[place : place + limit])
    period = len(token_ids) - place
    while len(draft) < limit:
        draft.append(draft[len(draft) - period])
    return draft
