"""A dictionary in slices, so that a large one can grow, be searched and be freed without a long pause.

A dictionary that grows copies all of its entries at once, and one that is dropped frees all of them at once: with a
million entries either holds an event loop up for a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Generic, TypeVar

NUM_SLICES: Final = 256

K = TypeVar("K")
V = TypeVar("V")


class SlicedDict(Generic[K, V]):
    __slots__ = ("_slices",)

    def __init__(self) -> None:
        self._slices: list[dict[K, V]] = [{} for _ in range(NUM_SLICES)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SlicedDict) and self._slices == other._slices

    def __len__(self) -> int:
        return sum(map(len, self._slices))

    def __setitem__(self, key: K, value: V) -> None:
        self._slice_of(key)[key] = value

    def get(self, key: K) -> V | None:
        return self._slice_of(key).get(key)

    def pop(self, key: K) -> V | None:
        return self._slice_of(key).pop(key, None)

    def values_of(self, number: int) -> Iterable[V]:
        """Those of one of NUM_SLICES slices. Entries may be removed meanwhile."""
        return list(self._slices[number].values())

    def drop_some(self, number: int, max_entries: int) -> bool:
        """Drop some entries of a slice. Returns whether it has more."""
        entries = self._slices[number]
        for _ in range(min(max_entries, len(entries))):
            entries.popitem()
        return bool(entries)

    def _slice_of(self, key: K) -> dict[K, V]:
        # The lowest bits of the hash are those by which a dictionary places its entries.
        return self._slices[(hash(key) >> 24) % NUM_SLICES]
