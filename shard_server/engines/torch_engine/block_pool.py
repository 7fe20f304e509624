"""Reference-counted KV blocks with a prefix cache: what each block holds, how often it is used, and which is evicted
first.

A block is free (its content is worthless), referenced (in at least one live block table) or evictable (cached but not
referenced). The cached blocks form a tree: a block is cached only below the very block that its KV was computed after,
so a match is verified by identity of the parent and equality of the token ids, never by hash alone (xxh3 collides).

Blocks have owners, whose shares decide which cached block is evicted first (eviction_order.py). A block must not be
evicted before those below it. Among blocks of one owner that follows from the order of their last uses; and a block
that is not its parent's owner's belongs to one without a share: what a sequence with a share caches or takes over below
another owner's block becomes that owner's.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvloom_common.text.block_hash import BYTES_PER_TOKEN, block_hashes, token_bytes
from shard_server.engines.base import BlockRemoved, BlockStored, KvEvent
from shard_server.engines.eviction_order import EvictionOrder, KvOwner


class BlockKey(NamedTuple):
    """The content of a full block."""

    block_hash: int
    """Chained, see kvloom_common/text/block_hash.py."""
    token_data: bytes
    """The block's token ids, little-endian uint32."""


def extend_block_keys(keys: list[BlockKey], token_ids: Sequence[int], block_size: int, root_hash: int) -> None:
    """Append the keys of the full blocks of `token_ids` that `keys` lacks."""
    first = len(keys) * block_size
    if len(token_ids) - first < block_size:
        return
    tail = token_ids[first:]
    data = token_bytes(tail)
    stride = block_size * BYTES_PER_TOKEN
    parent_hash = keys[-1].block_hash if keys else root_hash
    for index, digest in enumerate(block_hashes(tail, block_size, parent_hash)):
        keys.append(BlockKey(digest, data[index * stride : (index + 1) * stride]))


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """One slot of the KV memory."""

    block_id: int
    owner: KvOwner
    """Has a meaning unless the block is free."""
    ref_count: int = 0
    key: BlockKey | None = None
    """Set while the block is in the prefix cache."""
    parent: Block | int | None = None
    """Set while the block is cached: the cached block before it, or the root hash for a sequence's first block."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. Not thread-safe: it belongs to the compute thread."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.order = EvictionOrder(num_blocks)
        """The evictable blocks."""
        self._blocks = [Block(block_id, self.order.common) for block_id in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, Block] = {}
        self._events: list[KvEvent] = []
        self._removed: list[int] = []  # evicted since the last event

    @property
    def num_available(self) -> int:
        """The number of blocks that `allocate` could return: free and evictable ones."""
        return len(self._free) + self.order.num_unused

    def num_available_to(self, owner: KvOwner) -> int:
        """Those of them that are not protected by the shares of others."""
        return len(self._free) + self.order.num_available_to(owner)

    @property
    def num_available_to_any(self) -> int:
        """The number of blocks that a new sequence without a share could get now."""
        return self.num_available_to(self.order.common) if self.order.uses_lent_blocks else self.num_available

    @property
    def cached_hashes(self) -> set[int]:
        return set(self._cached)

    def is_cached(self, block_hash: int) -> bool:
        """True when a block of that hash is in the prefix cache: good for an estimate, not for reuse."""
        return block_hash in self._cached

    def match_prefix(self, keys: Sequence[BlockKey], root_hash: int) -> list[int]:
        """The ids of the cached blocks that hold the longest prefix of `keys`. Takes no reference."""
        matched: list[int] = []
        parent: Block | int = root_hash
        for key in keys:
            block = self._find(key, parent)
            if block is None:
                break
            matched.append(block.block_id)
            parent = block
        return matched

    def num_evictable(self, block_ids: Iterable[int]) -> int:
        """How many of these are available now and will not be once they are referenced."""
        return sum(1 for block_id in block_ids if self._blocks[block_id].ref_count == 0)

    def reference(self, block_ids: Iterable[int], owner: KvOwner | None = None) -> None:
        """Add a reference to each of the blocks that `match_prefix` found, for a sequence of `owner`, by default the
        common one."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                self.order.use(block_id, block.owner)
            if owner is not None and owner.takes_over(block.owner):
                self._move(block, _owner_below(block.parent, owner))
            block.ref_count += 1

    def allocate(self, num_blocks: int, owner: KvOwner | None = None) -> list[int]:
        """Blocks for new KV of a sequence of `owner`, by default the common one; one reference each. Evicts cached ones
        when no free ones are left.

        The caller has checked `num_available`.
        """
        assert num_blocks <= self.num_available, f"{num_blocks} blocks requested, {self.num_available} available"
        order = self.order
        owner = owner or order.common
        # What the common owner uses does not change which block is evicted next.
        is_common = owner is order.common
        if is_common:
            order.add_used(owner, num_blocks)
        block_ids: list[int] = []
        for _ in range(num_blocks):
            block = self._blocks[self._free.pop() if self._free else self._evict(owner)]
            block.ref_count = 1
            block.owner = owner
            if not is_common:
                order.add_used(owner)
            block_ids.append(block.block_id)
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Release one sequence's references to its whole block table.

        Tail first, so that the blocks of a sequence that the fewest others can share are evicted first, and a child
        always before its parent.
        """
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.key is None:
                    self._free.append(block_id)
                    self.order.drop_used(block.owner)
                else:
                    self.order.add_unused(block_id, block.owner)

    def cache_blocks(self, block_table: list[int], start: int, keys: Sequence[BlockKey], root_hash: int) -> int:
        """Offer block_table[start : start + len(keys)], whose KV has just been computed, for reuse.

        Where the same content is cached already (two sequences computed it at once), the table is switched to that
        block and its own is freed. Returns how many could be cached: fewer than offered only after a hash
        collision, after which no block of this sequence can be cached.
        """
        parent: Block | int = self._blocks[block_table[start - 1]] if start else root_hash
        stored: list[int] = []
        num_cached = 0
        for index, key in enumerate(keys, start):
            twin = self._cached.get(key.block_hash)
            if twin is None:
                block = self._blocks[block_table[index]]
                block.key, block.parent = key, parent
                if block.owner is not self.order.common:
                    self._move(block, _owner_below(parent, block.owner))
                self._cached[key.block_hash] = block
                stored.append(key.block_hash)
            elif twin is self._find(key, parent):
                block = twin
                self.reference((twin.block_id,), self._blocks[block_table[index]].owner)
                self.free((block_table[index],))
                block_table[index] = twin.block_id
            else:
                break
            parent = block
            num_cached += 1
        if stored:
            self._flush_removed()
            self._events.append(BlockStored(stored))
        return num_cached

    def take_events(self) -> list[KvEvent]:
        """Returns what changed in the prefix cache since the last call, in order."""
        self._flush_removed()
        events, self._events = self._events, []
        return events

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every block is in exactly one state and `block_tables` (those of all live
        sequences) account for every reference. O(num_blocks)."""
        references = Counter(block_id for table in block_tables for block_id in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        for block in self._blocks:
            block_id, key = block.block_id, block.key
            assert block.ref_count == references[block_id], f"block {block_id}: references do not add up"
            assert (block_id in free) == (block.ref_count == 0 and key is None), f"block {block_id}: free or not"
            assert (block_id in block.owner.unused) == (block.ref_count == 0 and key is not None), (
                f"block {block_id}: evictable or not"
            )
            assert key is None or self._cached.get(key.block_hash) is block, f"block {block_id}: not in the cache"
            parent = block.parent
            if isinstance(parent, Block):
                assert parent.key is not None, f"block {block_id}: cached without its parent"
                assert parent.ref_count >= block.ref_count, f"block {block_id}: held without its parent"
                assert block.owner in (parent.owner, self.order.common) or not block.owner.guarantee, (
                    f"block {block_id}: its owner's share does not protect its parent"
                )
            assert (key is None) == (parent is None), f"block {block_id}: half cached"
        assert sum(block.key is not None for block in self._blocks) == len(self._cached), "stale cache entries"
        self._check_order()

    def _check_order(self) -> None:
        self.order.check_integrity()
        num_unused = sum(block.ref_count == 0 and block.key is not None for block in self._blocks)
        assert self.order.num_unused == num_unused, "evictable blocks are counted wrongly"
        num_used = Counter(id(block.owner) for block in self._blocks if block.ref_count)
        for owner in (self.order.common, *self.order.owners):
            assert owner.num_used == num_used[id(owner)], "an owner's blocks are counted wrongly"

    def _find(self, key: BlockKey, parent: Block | int) -> Block | None:
        block = self._cached.get(key.block_hash)
        if block is None or block.parent != parent or block.key != key:
            return None
        return block

    def _move(self, block: Block, owner: KvOwner) -> None:
        """A used block belongs to another owner from now on."""
        if owner is not block.owner:
            self.order.drop_used(block.owner)
            self.order.add_used(owner)
            block.owner = owner

    def _evict(self, owner: KvOwner) -> int:
        block_id = self.order.evict(owner)
        block = self._blocks[block_id]
        assert block.key is not None
        del self._cached[block.key.block_hash]
        self._removed.append(block.key.block_hash)
        block.key = block.parent = None
        return block_id

    def _flush_removed(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(self._removed))
            self._removed = []


def _owner_below(parent: Block | int | None, owner: KvOwner) -> KvOwner:
    """To whom a block belongs that a sequence of `owner`, which is not the common one, has below `parent`."""
    return parent.owner if isinstance(parent, Block) else owner
