"""A cache of bounded memory whose entries belong to scopes, such as tenants, and expire."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from typing import Final, Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_ENTRIES: Final = 65_536


class _Entry(NamedTuple, Generic[V]):
    value: V
    num_bytes: int
    scope: str
    expires_at: float


class ScopedCache(Generic[K, V]):
    """Values by key. The least recently used ones go when there is no room. Times are seconds of any one clock."""

    def __init__(self, max_bytes: int, max_entries: int, size: Callable[[V], int]) -> None:
        """`size` says how many bytes a value counts as."""
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._size = size
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        self.num_bytes = 0
        self.num_evicted = 0
        """Values that had to go before their time."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, now: float) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires_at <= now:
            self.drop(key)
            return None
        self._entries.move_to_end(key)
        return entry.value

    def put(self, key: K, value: V, scope: str, expires_at: float) -> None:
        """A value larger than everything that may be kept is not."""
        size = self._size(value)
        if size > self._max_bytes:
            return
        self.drop(key)
        while self._entries and (self.num_bytes + size > self._max_bytes or len(self) >= self._max_entries):
            self.drop(next(iter(self._entries)))
            self.num_evicted += 1
        self._entries[key] = _Entry(value, size, scope, expires_at)
        self.num_bytes += size

    def drop(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes

    def clear(self, scopes: Collection[str] | None) -> int:
        """Forget the values of some scopes, or of all (None). Returns how many there were."""
        keys = [key for key, entry in self._entries.items() if scopes is None or entry.scope in scopes]
        for key in keys:
            self.drop(key)
        return len(keys)
