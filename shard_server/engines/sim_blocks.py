"""KV block accounting of the simulated engine: capacity, prefix cache and LRU, without any KV.

A block is free, private (held by one sequence, not full yet), cached and referenced, or cached and unreferenced (in
the LRU). Only hashes are kept: there is no KV that a hash collision could corrupt. Which cached block is evicted first
follows from the shares of their owners (eviction_order.py), as in the torch engine's BlockPool.

Invariants: the four kinds always add up to `num_blocks`; a cached block's parent is cached too, because sequences
reference whole prefixes and release them child first, so that the LRU evicts children before parents; a block that is
not its parent's owner's belongs to one without a share.
"""

from __future__ import annotations

from collections.abc import Sequence

from shard_server.engines.base import BlockRemoved, BlockStored, KvEvent
from shard_server.engines.eviction_order import EvictionOrder, KvOwner


class SimBlockPool:
    """The blocks of one simulated engine."""

    def __init__(self, num_blocks: int) -> None:
        self.order = EvictionOrder(num_blocks)
        """Cached blocks that no sequence holds."""
        self._num_free = num_blocks
        self._reference_counts: dict[int, int] = {}
        """block hash → how many sequences hold it."""
        self._owners: dict[int, KvOwner] = {}
        """block hash → its owner, of all cached blocks."""
        self._events: list[KvEvent] = []

    @property
    def num_available(self) -> int:
        """The number of blocks that `allocate` could take: free ones and unreferenced cached ones."""
        return self._num_free + self.order.num_unused

    def num_available_to(self, owner: KvOwner) -> int:
        """Those of them that are not protected by the shares of others."""
        return self._num_free + self.order.num_available_to(owner)

    @property
    def num_available_to_any(self) -> int:
        """The number of blocks that a new sequence without a share could get now."""
        return self.num_available_to(self.order.common) if self.order.uses_lent_blocks else self.num_available

    def is_cached(self, block_hash: int) -> bool:
        return block_hash in self._owners

    def count_cached(self, hashes: Sequence[int]) -> int:
        """The number of leading hashes that are cached."""
        for i, block_hash in enumerate(hashes):
            if not self.is_cached(block_hash):
                return i
        return len(hashes)

    def reference(self, hashes: Sequence[int], owner: KvOwner | None = None) -> None:
        """Hold blocks that are cached, from the first of a sequence on. The sequence is one of `owner`, by default the
        common one."""
        parent = None
        for block_hash in hashes:
            self._reference(block_hash, owner or self.order.common, parent)
            parent = block_hash

    def allocate(self, count: int, owner: KvOwner | None = None) -> None:
        """Take private blocks, evicting cached ones if need be. `count` must be available."""
        owner = owner or self.order.common
        num_evicted = count - self._num_free
        if num_evicted <= 0:
            self.order.add_used(owner, count)
        else:
            # One after another, since what the owner holds decides which is evicted next.
            self.order.add_used(owner, self._num_free)
            evicted: list[int] = []
            for _ in range(num_evicted):
                block_hash = self.order.evict(owner)
                del self._owners[block_hash]
                evicted.append(block_hash)
                self.order.add_used(owner)
            self._events.append(BlockRemoved(evicted))
            self._num_free += num_evicted
        self._num_free -= count

    def store(self, hashes: Sequence[int], owner: KvOwner | None = None, parent: int | None = None) -> None:
        """Cache a sequence's private blocks that are full now, with one reference each. A block that another sequence
        has cached meanwhile is shared with it, and the private one is freed. `parent` is the block before them."""
        owner = owner or self.order.common
        new: list[int] = []
        for block_hash in hashes:
            if block_hash in self._owners:
                self._reference(block_hash, owner, parent)
                self._num_free += 1
                self.order.drop_used(owner)
            else:
                self._reference_counts[block_hash] = 1
                self._owners[block_hash] = owner
                if owner is not self.order.common:
                    self._move(block_hash, self._owner_below(parent, owner))
                new.append(block_hash)
            parent = block_hash
        if new:
            self._events.append(BlockStored(new))

    def free(self, hashes: Sequence[int], num_private: int, owner: KvOwner | None = None) -> None:
        """Release a sequence's blocks: its cached prefix, parents first, and the private ones after it."""
        self._num_free += num_private
        self.order.drop_used(owner or self.order.common, num_private)
        counts = self._reference_counts
        for block_hash in reversed(hashes):
            counts[block_hash] -= 1
            if not counts[block_hash]:
                del counts[block_hash]
                self.order.add_unused(block_hash, self._owners[block_hash])

    def take_events(self) -> list[KvEvent]:
        """Returns what changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _reference(self, block_hash: int, owner: KvOwner, parent: int | None) -> None:
        count = self._reference_counts.get(block_hash, 0)
        if not count:
            self.order.use(block_hash, self._owners[block_hash])
        if owner.takes_over(self._owners[block_hash]):
            self._move(block_hash, self._owner_below(parent, owner))
        self._reference_counts[block_hash] = count + 1

    def _move(self, block_hash: int, owner: KvOwner) -> None:
        """A block that is held belongs to another owner from now on."""
        self.order.drop_used(self._owners[block_hash])
        self.order.add_used(owner)
        self._owners[block_hash] = owner

    def _owner_below(self, parent: int | None, owner: KvOwner) -> KvOwner:
        """To whom a block belongs that a sequence of `owner`, which is not the common one, has below `parent`."""
        return owner if parent is None else self._owners[parent]
