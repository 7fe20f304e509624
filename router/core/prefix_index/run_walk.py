"""The walk along a prompt's hashes: the hot part of block_runs, as functions of its tables."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from router.core.prefix_index.shard_bits import ShardBits

SEGMENT_MASK: Final = 255
"""The map is split into 256 dicts by the low bits of the hash: a dict that grows is copied, and copying one with
millions of entries would stop the process for half a second."""

HASH_TYPECODE: Final = "L" if array("L").itemsize == 8 else "Q"
"""The type of 64-bit hashes in an array. CPython converts ints to a C long three times as fast as to a long long."""


def pack(hashes: Iterable[int]) -> bytes:
    """8 bytes per hash, in the machine's byte order. Raises OverflowError for a number that is not an unsigned 64-bit
    integer."""
    return array(HASH_TYPECODE, hashes).tobytes()


def locate(packed: bytes, data: bytes, index: int) -> tuple[int, int]:
    """The position in the run `packed` of the hash data[index], which it must contain, and how many hashes from there
    on are the same in both."""
    start = 8 * index
    if data.startswith(packed, start):
        return 0, len(packed) >> 3
    block_hash = data[start : start + 8]
    at = packed.find(block_hash)
    while at & 7:  # between two hashes
        at = packed.find(block_hash, at + 1)
    following = packed[at + 8 : at + 16]
    if not following or following != data[start + 8 : start + 16]:
        return at >> 3, 1
    size = min(len(packed) - at, len(data) - start)
    ours, theirs = packed[at : at + size], data[start : start + size]
    if ours == theirs:
        return at >> 3, size >> 3
    differing = int.from_bytes(ours, "little") ^ int.from_bytes(theirs, "little")
    lowest_bit = (differing & -differing).bit_length() - 1
    return at >> 3, lowest_bit >> 6


def leading_blocks(
    segments: Sequence[Mapping[int, int]],
    packed_runs: Mapping[int, bytes],
    uniform: Mapping[int, int],
    mixed: Mapping[int, Sequence[int]],
    hashes: Sequence[int],
    bits: ShardBits,
) -> dict[str, int]:
    """The number of leading blocks of `hashes` that each shard holds; shards with none are left out."""
    depths: dict[str, int] = {}
    bit_of, shard_id_of = bits.bit_of, bits.shard_id_of
    shards = last = bits.all
    index, num_hashes = 0, len(hashes)
    data = b""
    while index < num_hashes:
        block_hash = hashes[index]
        run = segments[block_hash & SEGMENT_MASK].get(block_hash)
        if run is None:
            break
        if not data:
            data = pack(hashes)
        packed = packed_runs[run]
        mask = uniform[run]
        start = 8 * index
        if data.startswith(packed, start):
            first, count = 0, len(packed) >> 3
        elif mask and packed.find(data[start : start + 16]) < 0:
            first, count = 0, 1  # its neighbour is elsewhere, so its position in the run does not matter
        else:
            first, count = locate(packed, data, index)
        if mask:
            masks, step = (mask,), count
        else:
            masks, step = mixed[run][first : first + count], 1
        for mask in masks:
            if mask is not last and mask != last:
                last = mask
                kept = shards & mask
                if kept != shards:
                    gone, shards = shards ^ kept, kept
                    number = gone.bit_length() - 1
                    if not index:
                        pass  # shards without a single block are left out
                    elif gone == bit_of[number]:
                        depths[shard_id_of[number]] = index
                    else:
                        depths.update(dict.fromkeys(bits.shard_ids(gone), index))
                    if not kept:
                        return depths
            index += step
    if index:
        depths.update(dict.fromkeys(bits.shard_ids(shards), index))
    return depths
