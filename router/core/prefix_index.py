"""Which shard holds which KV block.

Exact as far as the shards' numbered KV events go, plus blocks of requests that were just placed and whose prefill has
not been reported yet: two requests with one new prefix then go to one shard. Being wrong costs speed, never
correctness. Sets of shards are bit masks, so that one walk along a prompt's hashes serves all shards at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Final

from router.core.events import KvChange

PLACED_TTL_SECONDS: Final = 30.0
STORE_RATE_SECONDS: Final = 60.0
"""Time constant of the moving average of blocks stored a second."""


@dataclasses.dataclass(slots=True)
class _ShardBlocks:
    number: int
    bit: int
    max_blocks: int
    stored: set[int] = dataclasses.field(default_factory=set)
    placed: dict[int, float] = dataclasses.field(default_factory=dict)
    """Hash → when it expires, in the order of expiry."""
    next_event_number: int | None = None
    """None: a snapshot is awaited, events are ignored."""
    store_rate: float = 0.0
    store_rate_at: float = 0.0


class PrefixIndex:
    """Memory is bounded by what the shards can hold: at most `max_blocks` stored and as many placed hashes each."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        """Block hash → shards that hold it or are about to. Never 0."""
        self._shards: dict[str, _ShardBlocks] = {}
        self._free_numbers: list[int] = []
        self._ids: list[str] = []
        """Shard number → shard_id ("" = free)."""

    def add_shard(self, shard_id: str, max_blocks: int, now: float) -> None:
        """A shard with unknown contents; its snapshot is to follow."""
        assert shard_id not in self._shards
        if self._free_numbers:
            number = self._free_numbers.pop()
            self._ids[number] = shard_id
        else:
            number = len(self._ids)
            self._ids.append(shard_id)
        self._shards[shard_id] = _ShardBlocks(number, 1 << number, max_blocks, store_rate_at=now)

    def remove_shard(self, shard_id: str) -> None:
        shard = self._shards.pop(shard_id)
        for block_hash in shard.stored:
            self._clear_bit(block_hash, shard.bit)
        for block_hash in shard.placed:
            self._clear_bit(block_hash, shard.bit)
        self._ids[shard.number] = ""
        self._free_numbers.append(shard.number)

    def apply_events(self, shard_id: str, number: int, changes: Iterable[KvChange], now: float) -> bool:
        """Apply one numbered batch. True when it reveals a gap: ask for a snapshot (told once per gap)."""
        shard = self._shards[shard_id]
        if shard.next_event_number is None or number < shard.next_event_number:
            return False
        if number > shard.next_event_number:
            shard.next_event_number = None
            return True
        shard.next_event_number = number + 1
        num_stored = 0
        for change in changes:
            if change.cleared:
                self._replace_stored(shard, ())
            for block_hash in change.removed:
                self._remove_stored(shard, block_hash)
            for block_hash in change.stored:
                self._add_stored(shard, block_hash)
            num_stored += len(change.stored)
        if num_stored:
            self._count_stores(shard, num_stored, now)
        return False

    def apply_snapshot(self, shard_id: str, number: int, block_hashes: Iterable[int]) -> None:
        """Replace what is believed of a shard; one that is older than the events already applied is ignored."""
        shard = self._shards[shard_id]
        if shard.next_event_number is not None and number + 1 < shard.next_event_number:
            return
        self._replace_stored(shard, block_hashes)
        shard.next_event_number = number + 1

    def place(self, shard_id: str, block_hashes: Iterable[int], now: float) -> None:
        """A request with these blocks was sent there: believe in them for PLACED_TTL_SECONDS, or until stored."""
        shard = self._shards[shard_id]
        self._expire_placed(shard, now)
        masks, stored, placed, bit = self._masks, shard.stored, shard.placed, shard.bit
        expires_at = now + PLACED_TTL_SECONDS
        for block_hash in block_hashes:
            if block_hash in stored:
                continue
            if placed.pop(block_hash, None) is None:
                masks[block_hash] = masks.get(block_hash, 0) | bit
            placed[block_hash] = expires_at
        while len(placed) > shard.max_blocks:
            self._drop_placed(shard, next(iter(placed)))

    def count_overlaps(self, block_hashes: Sequence[int], now: float) -> dict[str, int]:
        """Leading blocks of `block_hashes` that each shard holds; shards with none are left out."""
        overlaps: dict[str, int] = {}
        for shard in self._shards.values():
            self._expire_placed(shard, now)
        masks = self._masks
        alive = (1 << len(self._ids)) - 1
        depth = 0
        for block_hash in block_hashes:
            mask = masks.get(block_hash, 0)
            if mask != alive:
                gone = alive & ~mask
                if gone:
                    self._note_depth(overlaps, gone, depth)
                    alive &= mask
                    if not alive:
                        return overlaps
            depth += 1
        self._note_depth(overlaps, alive, depth)
        return overlaps

    def num_stored(self, shard_id: str) -> int:
        """Blocks that the shard is known to have cached."""
        return len(self._shards[shard_id].stored)

    def tail_age_seconds(self, shard_id: str, now: float) -> float:
        """How old the blocks are that the shard would evict next, by Little's law: blocks held / blocks stored a
        second. Infinite for a shard that stores nothing."""
        shard = self._shards[shard_id]
        rate = shard.store_rate * math.exp((shard.store_rate_at - now) / STORE_RATE_SECONDS)
        return len(shard.stored) / rate if rate > 1e-9 else math.inf

    def check_integrity(self) -> None:
        """Assert that the masks are exactly the union of what the shards hold."""
        expected: dict[int, int] = {}
        for shard in self._shards.values():
            assert self._ids[shard.number]
            assert shard.bit == 1 << shard.number
            assert len(shard.stored) <= shard.max_blocks
            assert len(shard.placed) <= shard.max_blocks
            assert not shard.placed.keys() & shard.stored
            for block_hash in (*shard.stored, *shard.placed):
                expected[block_hash] = expected.get(block_hash, 0) | shard.bit
        assert expected == self._masks

    def _note_depth(self, overlaps: dict[str, int], mask: int, depth: int) -> None:
        if not depth:
            return
        while mask:
            low = mask & -mask
            overlaps[self._ids[low.bit_length() - 1]] = depth
            mask ^= low

    def _add_stored(self, shard: _ShardBlocks, block_hash: int) -> None:
        if block_hash in shard.stored:
            return
        if len(shard.stored) >= shard.max_blocks:
            # More than it has: the shard miscounts. Knowing less is safe, growing without bound is not.
            return
        shard.stored.add(block_hash)
        if shard.placed.pop(block_hash, None) is None:
            self._masks[block_hash] = self._masks.get(block_hash, 0) | shard.bit

    def _remove_stored(self, shard: _ShardBlocks, block_hash: int) -> None:
        if block_hash in shard.stored:
            shard.stored.remove(block_hash)
            self._clear_bit(block_hash, shard.bit)

    def _replace_stored(self, shard: _ShardBlocks, block_hashes: Iterable[int]) -> None:
        for block_hash in shard.stored:
            self._clear_bit(block_hash, shard.bit)
        shard.stored.clear()
        for block_hash in block_hashes:
            self._add_stored(shard, block_hash)

    def _expire_placed(self, shard: _ShardBlocks, now: float) -> None:
        while shard.placed:
            block_hash = next(iter(shard.placed))
            if shard.placed[block_hash] > now:
                return
            self._drop_placed(shard, block_hash)

    def _drop_placed(self, shard: _ShardBlocks, block_hash: int) -> None:
        del shard.placed[block_hash]
        self._clear_bit(block_hash, shard.bit)

    def _clear_bit(self, block_hash: int, bit: int) -> None:
        mask = self._masks[block_hash] & ~bit
        if mask:
            self._masks[block_hash] = mask
        else:
            del self._masks[block_hash]

    def _count_stores(self, shard: _ShardBlocks, num_stored: int, now: float) -> None:
        decay = math.exp((shard.store_rate_at - now) / STORE_RATE_SECONDS)
        shard.store_rate = shard.store_rate * decay + num_stored / STORE_RATE_SECONDS
        shard.store_rate_at = now
