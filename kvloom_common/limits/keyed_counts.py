"""Counts of what different keys hold at a time, such as callers or addresses."""

from __future__ import annotations

from typing import TypeVar

_Key = TypeVar("_Key")


class KeyedCounts(dict[_Key, int]):
    """Keys that hold nothing count as 0 and take no memory."""

    __slots__ = ()

    def __missing__(self, key: _Key) -> int:
        return 0

    def add(self, key: _Key, count: int = 1) -> None:
        self[key] += count

    def remove(self, key: _Key, count: int = 1) -> None:
        """`key` must hold at least `count`."""
        self[key] -= count
        if not self[key]:
            del self[key]
