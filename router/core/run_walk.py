"""The walk along a prompt's hashes: the hot part of block_runs, as functions of its tables."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

Stretches = list[tuple[int, int]]
"""(shards, how many leading blocks they hold), shards as a bit mask, each shard once, deepest last."""


def pack(hashes: Iterable[int]) -> bytes:
    """8 bytes a hash, in the machine's order. Raises OverflowError for what is no unsigned 64-bit number."""
    return array("Q", hashes).tobytes()


def locate(packed: bytes, data: bytes, index: int) -> tuple[int, int]:
    """Where in the run `packed` the hash data[index] is, which it must contain, and how many hashes from there on are
    the same in both."""
    start = 8 * index
    if data.startswith(packed, start):
        return 0, len(packed) >> 3
    at = packed.find(data[start : start + 8])
    while at & 7:  # between two hashes
        at = packed.find(data[start : start + 8], at + 1)
    size = min(len(packed) - at, len(data) - start)
    ours, theirs = packed[at : at + size], data[start : start + size]
    if ours == theirs:
        return at >> 3, size >> 3
    if ours[8:16] != theirs[8:16]:
        return at >> 3, 1
    differing = int.from_bytes(ours, "little") ^ int.from_bytes(theirs, "little")
    lowest_bit = (differing & -differing).bit_length() - 1
    return at >> 3, lowest_bit >> 6


def leading_blocks(
    segments: Sequence[Mapping[int, int]],
    packed_runs: Mapping[int, bytes],
    uniform: Mapping[int, int],
    mixed: Mapping[int, Sequence[int]],
    hashes: Sequence[int],
    shards: int,
) -> Stretches:
    """How many leading blocks of `hashes` each of `shards` (a bit mask) holds; those with none are left out."""
    stretches: Stretches = []
    index, num_hashes = 0, len(hashes)
    data = b""
    last = shards
    while index < num_hashes and shards:
        block_hash = hashes[index]
        run = segments[block_hash & 255].get(block_hash)
        if run is None:
            break
        if not data:
            data = pack(hashes)
        packed = packed_runs[run]
        if data.startswith(packed, 8 * index):
            first, count = 0, len(packed) >> 3
        else:
            first, count = locate(packed, data, index)
        mask = uniform.get(run)
        if mask is not None:
            kept = shards & mask
            if kept != shards:
                if index:
                    stretches.append((shards ^ kept, index))
                shards = kept
                if not kept:
                    return stretches
            index += count
            continue
        for mask in mixed[run][first : first + count]:
            if mask is not last:
                last = mask
                kept = shards & mask
                if kept != shards:
                    if index:
                        stretches.append((shards ^ kept, index))
                    shards = kept
                    if not kept:
                        return stretches
            index += 1
    if index and shards:
        stretches.append((shards, index))
    return stretches
