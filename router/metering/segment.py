"""Records as bytes of a file, each with its number and a checksum. Pure.

A file may end anywhere within a record, or with what a disk made of it when the power failed. What precedes the first
record that is not whole counts; nothing after it does.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

_HEAD: Final = struct.Struct("<IIQ")
"""Length, CRC-32 of number and payload, number."""
_NUMBER: Final = struct.Struct("<Q")
MAX_PAYLOAD_BYTES: Final = 1 << 20


def encode(number: int, payload: bytes) -> bytes:
    """Raises ValueError for a payload that is larger than MAX_PAYLOAD_BYTES."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a record of {len(payload)} bytes is larger than {MAX_PAYLOAD_BYTES}")
    return _HEAD.pack(len(payload), _checksum(number, payload), number) + payload


def decode(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers and payloads, up to the first record that is not whole."""
    at = 0
    while at + _HEAD.size <= len(content):
        length, checksum, number = _HEAD.unpack_from(content, at)
        end = at + _HEAD.size + length
        if length > MAX_PAYLOAD_BYTES or end > len(content):
            return
        payload = content[at + _HEAD.size : end]
        if _checksum(number, payload) != checksum:
            return
        yield number, payload
        at = end


def _checksum(number: int, payload: bytes) -> int:
    # Not 0 for nothing: a file system may leave zeros where data was to be.
    return zlib.crc32(payload, zlib.crc32(_NUMBER.pack(number), 0x6B76))
