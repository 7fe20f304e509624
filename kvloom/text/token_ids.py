"""Token ids as processes pass them on: packed, four bytes each. A long prompt is then copied as a whole. As a list it
would be thousands of objects, which every process on its path would have to make and convert."""

from __future__ import annotations

import functools
import sys
from array import array
from collections.abc import Iterable
from typing import Any, Final

BYTES_PER_ID: Final = 4
_CHUNK_IDS: Final = 1024
_SIGNS: Final = int.from_bytes(b"\0\0\0\x80" * _CHUNK_IDS, "little")
_IS_BIG_ENDIAN: Final = sys.byteorder == "big"


def token_array(ids: Iterable[int] = ()) -> array[int]:
    """The ids as an array in memory. Raises OverflowError for ids outside [0, 2**32)."""
    return array("I", ids)


def pack_token_ids(ids: Iterable[int]) -> bytes:
    """The ids as the wire has them: little-endian. Raises OverflowError for ids outside [0, 2**32)."""
    packed = ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)
    if _IS_BIG_ENDIAN:
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> array[int]:
    """The ids from the wire's bytes. Raises ValueError when bytes are missing."""
    ids = array("I", packed)
    if _IS_BIG_ENDIAN:
        ids.byteswap()
    return ids


def prompt_fields(ids: Iterable[int], *, packed: bool) -> dict[str, Any]:
    """The prompt's field of a Submit or ShardSubmit, in the form that its reader supports."""
    return {"packed_prompt_token_ids": pack_token_ids(ids)} if packed else {"prompt_token_ids": ids}


def are_below(ids: array[int], limit: int) -> bool:
    """Returns True when all ids are below `limit`, which is at least 1 and at most 2**31. This makes no object per id,
    and takes a third of the time of `max(ids)`.

    1,024 ids at a time are read as one large number, whose lanes of 32 bits are tested together. Adding 2**31 - limit
    to each lane sets its highest bit if the id is too large. It carries into no other lane unless an id has that bit
    itself, which is tested too.
    """
    packed = memoryview(ids).cast("B")
    offsets = _offsets(limit)
    for begin in range(0, len(packed), BYTES_PER_ID * _CHUNK_IDS):
        lanes = int.from_bytes(packed[begin : begin + BYTES_PER_ID * _CHUNK_IDS], sys.byteorder)
        if (lanes | (lanes + offsets)) & _SIGNS:
            return False
    return True


@functools.lru_cache(maxsize=16)
def _offsets(limit: int) -> int:
    assert 1 <= limit <= 2**31
    return _SIGNS - limit * (_SIGNS >> 31)
