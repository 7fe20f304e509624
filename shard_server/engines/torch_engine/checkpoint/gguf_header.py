"""Checks that a GGUF file holds what its header claims, before the reader of the `gguf` package trusts it.

That reader takes every count in the file at its word: a claim of 2**60 array elements keeps it busy, and growing, for
ever. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little-endian, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALAR_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""By value type."""
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_DIMENSIONS: Final = 4
_MAX_ENTRIES: Final = 100_000
"""A file has at most so many entries of metadata, and so many tensors; models have hundreds."""
_MAX_ELEMENTS: Final = 4_000_000
"""An array has at most so many elements; the longest ones are vocabularies and their merges."""
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


def check_gguf_header(path: Path) -> None:
    """Raises ValueError, and OSError."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _Walk(content).check()


class _Walk:
    """Reads from the beginning of the file to the end of its header."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._size = len(content)
        self._at = len(_MAGIC)

    def check(self) -> None:
        version = self._number(_U32)
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not supported")
        num_tensors = self._count("tensors", _MAX_ENTRIES)
        num_entries = self._count("metadata entries", _MAX_ENTRIES)
        for _ in range(num_entries):
            self._skip_string()
            self._skip_value(self._number(_U32))
        for _ in range(num_tensors):
            self._skip_string()
            num_dimensions = self._number(_U32)
            if num_dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {num_dimensions} dimensions")
            self._skip(8 * num_dimensions + 4 + 8)  # the dimensions, the type and the offset

    def _number(self, form: struct.Struct) -> int:
        start = self._at
        self._skip(form.size)
        return form.unpack_from(self._content, start)[0]

    def _count(self, what: str, largest: int) -> int:
        count = self._number(_U64)
        if count > largest:
            raise ValueError(f"it claims {count} {what}")
        return count

    def _skip(self, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at > self._size:
            raise ValueError("it ends within its header")

    def _skip_string(self) -> None:
        self._skip(self._number(_U64))

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY:
            self._skip_array()
        elif kind in _SCALAR_BYTES:
            self._skip(_SCALAR_BYTES[kind])
        else:
            raise ValueError(f"a value has the unknown type {kind}")

    def _skip_array(self) -> None:
        kind = self._number(_U32)
        count = self._count("elements of an array", _MAX_ELEMENTS)
        if kind in _SCALAR_BYTES:
            self._skip(count * _SCALAR_BYTES[kind])
        elif kind == _STRING:
            for _ in range(count):
                self._skip_string()
        else:
            raise ValueError(f"an array has elements of type {kind}")
