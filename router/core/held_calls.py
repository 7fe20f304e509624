"""The tool calls in a gated answer: each is sent once all of it is clear, and none in part."""

from __future__ import annotations

from collections import deque
from typing import Final

from router.core.events import CallReader

MAX_CALL_SHARE: Final = 4
"""A call may withhold so many times the tokens that an answer may withhold otherwise. One that is longer ends its
answer: that it would be allowed is not known."""


class HeldCalls:
    """The calls of one choice. Positions are counted in characters from its beginning. A call reaches from the start of
    the delta in which it begins to the end of that in which it ends."""

    __slots__ = ("_begin", "_has_call", "_reader", "_whole")

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader
        self._whole: deque[tuple[int, int]] = deque()
        """The beginnings and ends of calls that have ended and are not clear."""
        self._begin: int | None = None
        """The beginning of the call that has not ended, or of what may become one."""
        self._has_call = False

    @property
    def is_inside(self) -> bool:
        """True when the text so far ends within a call, or within what may become one."""
        return self._begin is not None

    @property
    def has_any(self) -> bool:
        """True while a call is withheld, or what may become one."""
        return bool(self._whole) or self._begin is not None

    def read(self, delta: str, end: int) -> None:
        """Read the next text, whose last character is before position `end`."""
        is_inside, has_begun = self._reader.read(delta)
        begin = end - len(delta) if self._begin is None else self._begin
        self._has_call |= has_begun
        if is_inside:
            self._begin = begin
            return
        if self._has_call:
            self._whole.append((begin, end))
        self._begin, self._has_call = None, False

    def limit(self, num_clear_chars: int) -> int:
        """Return how many characters may be sent when so many are clear."""
        whole = self._whole
        while whole and whole[0][1] <= num_clear_chars:
            whole.popleft()
        begin = whole[0][0] if whole else self._begin
        return num_clear_chars if begin is None else min(num_clear_chars, begin)
