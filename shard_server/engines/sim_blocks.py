"""KV block accounting of the simulated engine: capacity, prefix cache and LRU, without any KV.

A block is free, private (held by one sequence, not full yet), cached and referenced, or cached and unreferenced (in
the LRU). Only hashes are kept: there is no KV that a hash collision could corrupt.

Invariants: the four kinds always add up to `num_blocks`; a cached block's parent is cached too, because sequences
reference whole prefixes and release them child first, so that the LRU evicts children before parents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from shard_server.engines.base import BlockRemoved, BlockStored, KvEvent


class SimBlockPool:
    """The blocks of one simulated engine."""

    def __init__(self, num_blocks: int) -> None:
        self._num_free = num_blocks
        self._reference_counts: dict[int, int] = {}
        """block hash → how many sequences hold it."""
        self._unreferenced: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that no sequence holds, in the order of eviction."""
        self._events: list[KvEvent] = []

    @property
    def num_available(self) -> int:
        """The number of blocks that `allocate` could take: free ones and unreferenced cached ones."""
        return self._num_free + len(self._unreferenced)

    def is_cached(self, block_hash: int) -> bool:
        return block_hash in self._reference_counts or block_hash in self._unreferenced

    def count_cached(self, hashes: Sequence[int]) -> int:
        """The number of leading hashes that are cached."""
        for i, block_hash in enumerate(hashes):
            if not self.is_cached(block_hash):
                return i
        return len(hashes)

    def reference(self, hashes: Sequence[int]) -> None:
        """Hold blocks that are cached."""
        for block_hash in hashes:
            if block_hash in self._unreferenced:
                del self._unreferenced[block_hash]
                self._reference_counts[block_hash] = 1
            else:
                self._reference_counts[block_hash] += 1

    def allocate(self, count: int) -> None:
        """Take private blocks, evicting the least recently used ones. `count` must be available."""
        num_evicted = count - self._num_free
        if num_evicted > 0:
            evicted = [self._unreferenced.popitem(last=False)[0] for _ in range(num_evicted)]
            self._events.append(BlockRemoved(evicted))
            self._num_free += num_evicted
        self._num_free -= count

    def store(self, hashes: Sequence[int]) -> None:
        """Cache the caller's private blocks that are full now, with one reference each. A block that another sequence
        has cached meanwhile is shared with it, and the private one is freed."""
        new: list[int] = []
        for block_hash in hashes:
            if block_hash in self._reference_counts or block_hash in self._unreferenced:
                self.reference((block_hash,))
                self._num_free += 1
            else:
                self._reference_counts[block_hash] = 1
                new.append(block_hash)
        if new:
            self._events.append(BlockStored(new))

    def free(self, hashes: Sequence[int], num_private: int) -> None:
        """Release a sequence's blocks: its cached prefix, parents first, and the private ones after it."""
        self._num_free += num_private
        counts = self._reference_counts
        for block_hash in reversed(hashes):
            counts[block_hash] -= 1
            if not counts[block_hash]:
                del counts[block_hash]
                self._unreferenced[block_hash] = None

    def take_events(self) -> list[KvEvent]:
        """What changed since the last call, in order."""
        events, self._events = self._events, []
        return events
