"""Tokens that were forwarded at once and are recorded in their sequences later, many frames at a time.

The record of a sequence's tokens is needed only when the sequence ends or has to continue elsewhere. Until then a
frame's arrays are kept as they arrived, so that forwarding a token touches no further memory of its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

MAX_FRAMES: Final = 32


class DeferredTokenLog:
    """Frames with one token per slot. `take` and `take_all` return each token exactly once."""

    __slots__ = ("_frames", "is_full")

    def __init__(self) -> None:
        self._frames: list[tuple[list[Any], Sequence[int], Sequence[str]]] = []
        """Each frame's slots (None: already taken), token ids and texts."""
        self.is_full = False
        """Set when the caller should call `take_all`."""

    def note(self, slots: list[Any], token_ids: Sequence[int], deltas: Sequence[str]) -> None:
        """Append a frame. The log owns the arrays from now on; they may still grow until the next frame is appended. A
        slot that is None counts as taken."""
        if self._frames and not self._frames[-1][0]:
            self._frames.pop()
        self._frames.append((slots, token_ids, deltas))
        self.is_full = len(self._frames) >= MAX_FRAMES

    def take(self, slot: int) -> tuple[list[int], str]:
        """Remove and return one slot's token ids and text."""
        own_ids: list[int] = []
        own_texts: list[str] = []
        for slots, token_ids, deltas in self._frames:
            while slot in slots:
                at = slots.index(slot)
                slots[at] = None
                own_ids.append(token_ids[at])
                own_texts.append(deltas[at])
        return own_ids, "".join(own_texts)

    def take_all(self) -> Iterator[tuple[int, Sequence[int], str]]:
        """Empty the log. Yields (slot, token ids, text). A slot may be yielded more than once; its tokens are in
        order."""
        taken, self._frames = self._frames, []
        self.is_full = False
        for slots, group in groupby(taken, itemgetter(0)):
            frames = list(group)
            ids_of_slots = zip(*[token_ids for _, token_ids, _ in frames], strict=True)
            texts_of_slots = zip(*[deltas for _, _, deltas in frames], strict=True)
            for slot, token_ids, texts in zip(slots, ids_of_slots, texts_of_slots, strict=True):
                if slot is not None:
                    yield slot, token_ids, "".join(texts)
