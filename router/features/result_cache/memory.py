"""The answers that one router keeps: the least recently used go first, and all after a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Final, NamedTuple

ENTRY_BYTES: Final = 400
"""About what an entry takes besides its answer: its key, its place in the dictionary, and the objects' heads."""

MAX_ENTRIES: Final = 65_536


class Entry(NamedTuple):
    answer: bytes
    scope: str
    """Who may get it: see ResultCache.scope_of."""
    expires_at: float


class ResultMemory:
    """Answers by key. Times are seconds of any one clock."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.num_bytes = 0
        self.num_evicted = 0
        """Answers that had to go before their time."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes, now: float) -> bytes | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires_at <= now:
            self.drop(key)
            return None
        self._entries.move_to_end(key)
        return entry.answer

    def put(self, key: bytes, answer: bytes, scope: str, expires_at: float) -> None:
        """An answer larger than everything that may be kept is not."""
        size = _size(answer)
        if size > self._max_bytes:
            return
        self.drop(key)
        while self._entries and (self.num_bytes + size > self._max_bytes or len(self) >= self._max_entries):
            self.drop(next(iter(self._entries)))
            self.num_evicted += 1
        self._entries[key] = Entry(answer, scope, expires_at)
        self.num_bytes += size

    def drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= _size(entry.answer)

    def clear(self, scopes: Collection[str] | None) -> int:
        """Forget the answers of some scopes, or of all (None). Returns how many there were."""
        keys = [key for key, entry in self._entries.items() if scopes is None or entry.scope in scopes]
        for key in keys:
            self.drop(key)
        return len(keys)


def _size(answer: bytes) -> int:
    return len(answer) + ENTRY_BYTES
