"""Tokens that went on at once and are written down later, many frames at a time.

What is remembered of a sequence's tokens is needed when it ends, or has to go on elsewhere. Until then a frame's arrays
are kept as they came: a token touches no memory of its own sequence but what it needs on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

MAX_FRAMES: Final = 32


class DeferredTokenLog:
    """Frames of one token a slot. Slots are found again by `take` and `take_all`, each token once."""

    __slots__ = ("_frames", "is_full")

    def __init__(self) -> None:
        self._frames: list[tuple[list[Any], Sequence[int], Sequence[str]]] = []
        """Slots (None: taken), token ids, text."""
        self.is_full = False
        """It is time to `take_all`."""

    def note(self, slots: list[Any], token_ids: Sequence[int], deltas: Sequence[str]) -> None:
        """Takes the arrays over: they may grow until the next frame, no more. A slot that is None counts as taken."""
        if self._frames and not self._frames[-1][0]:
            self._frames.pop()
        self._frames.append((slots, token_ids, deltas))
        self.is_full = len(self._frames) >= MAX_FRAMES

    def take(self, slot: int) -> tuple[list[int], str]:
        """One slot's token ids and text."""
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
        """(slot, its token ids, their text); a slot may come more than once, its tokens come in order."""
        taken, self._frames = self._frames, []
        self.is_full = False
        for slots, group in groupby(taken, itemgetter(0)):
            frames = list(group)
            ids_of_slots = zip(*[token_ids for _, token_ids, _ in frames], strict=True)
            texts_of_slots = zip(*[deltas for _, _, deltas in frames], strict=True)
            for slot, token_ids, texts in zip(slots, ids_of_slots, texts_of_slots, strict=True):
                if slot is not None:
                    yield slot, token_ids, "".join(texts)
