"""The operating system's random bytes, fetched in large reads, because a system call per request id costs more than the
rest of making the id. As unpredictable as `secrets`; safe across threads and forks."""

from __future__ import annotations

import os
import threading
from typing import Final

CHUNK_BYTES: Final = 4096


class _Stock:
    """Random bytes that have not been handed out yet."""

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
        """Called in a forked process, whose parent would hand out the same bytes."""
        self._lock = threading.Lock()
        self._bytes = b""
        self._position = 0


_stock: Final = _Stock()
os.register_at_fork(after_in_child=_stock.forget)


def random_hex(num_bytes: int) -> str:
    """`num_bytes` random bytes as hexadecimal digits, two per byte."""
    return _stock.take(num_bytes).hex()


def random_uint64() -> int:
    return int.from_bytes(_stock.take(8), "little")
