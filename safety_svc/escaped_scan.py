"""Searches for phrases in text as JSON reads it.

The arguments of a call are JSON, in which "launch\\ncode" and "\\u006caunch code" are what their reader must not get.
So text that has escapes is searched as it is written and as JSON reads it, wherever it stands.
"""

from __future__ import annotations

from kvloom_common.text.json_escapes import pieces
from safety_svc.phrase_scan import PhraseScan
from safety_svc.policy import Hit


class EscapedScan:
    """Searches as `PhraseScan` does. At most 11 characters of an escape that is not complete are withheld, too."""

    __slots__ = ("_cut", "_first", "_offsets", "_phrases", "_total", "num_clear")

    def __init__(self, phrases: PhraseScan) -> None:
        """`phrases` has searched the text so far, in which there was no escape."""
        self._phrases = phrases.copy()
        self._total = phrases.num_chars
        self._first = phrases.num_clear
        """How many characters JSON reads before those of `_offsets`."""
        self._offsets = list(range(phrases.num_clear, phrases.num_chars))
        """For each character that JSON reads and that is withheld, its offset in the text."""
        self._cut = ""
        """The beginning of an escape at the end of the text so far."""
        self.num_clear = phrases.num_clear
        """The number of characters, from the beginning of the text, that are not part of a phrase."""

    def push(self, delta: str, *, is_end: bool) -> Hit | None:
        """Search the next characters. Returns the first phrase that is found."""
        text, base = self._cut + delta, self._total - len(self._cut)
        self._total += len(delta)
        read: list[str] = []
        end = 0
        for piece in pieces(text, is_end=is_end):
            read.append(piece.read)
            at = base + piece.start
            self._offsets += [at] if piece.is_escape else range(at, at + len(piece.read))
            end = piece.end
        self._cut = text[end:]
        hit = self._phrases.push("".join(read), is_end=is_end)
        if hit is not None:
            hit = Hit(hit.rule, self._offsets[hit.start - self._first])
        num_read_clear = self._phrases.num_clear - self._first
        withheld = self._offsets[num_read_clear:]
        self.num_clear = withheld[0] if withheld else self._total - len(self._cut)
        self._first, self._offsets = self._phrases.num_clear, withheld
        return hit

    def skip(self, num_chars: int, last_char: str) -> None:
        """Account for text that is known to be clear. The text before it must be clear, too."""
        self._phrases.skip(num_chars, last_char)
        self._total += num_chars
        self._first += num_chars
        self.num_clear = self._total
