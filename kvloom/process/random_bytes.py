"""The operating system's random bytes, fetched many at a time: a system call for every id of a request costs more than
the id. As unpredictable as `secrets`; safe across threads and forks."""

from __future__ import annotations

import os
import threading
from typing import Final

CHUNK_BYTES: Final = 4096


class _Stock:
    """Bytes that nobody has got yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = b""
        self._position = 0

    def take(self, num_bytes: int) -> bytes:
        with self._lock:
            end = self._position + num_bytes
            if end > len(self._bytes):
                self._bytes, self._position, end = os.urandom(max(CHUNK_BYTES, num_bytes)), 0, num_bytes
            taken = self._bytes[self._position : end]
            self._position = end
        return taken

    def forget(self) -> None:
        """In a process that was forked: what is in stock is its parent's, too."""
        self._lock = threading.Lock()
        self._bytes = b""
        self._position = 0


_stock: Final = _Stock()
os.register_at_fork(after_in_child=_stock.forget)


def random_hex(num_bytes: int) -> str:
    """Two digits a byte."""
    return _stock.take(num_bytes).hex()


def random_uint64() -> int:
    return int.from_bytes(_stock.take(8), "little")
