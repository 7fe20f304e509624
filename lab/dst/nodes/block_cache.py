"""The prefix cache of a shard: the truth with which the routers' indexes are compared."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from kvloom.adapters import Adapter
from kvloom_common.kv_share import KvShare
from kvloom_common.text.block_hash import block_hashes, root_hash
from lab.dst.scenario import ShardShape
from router.core.events import KvChange, Request
from shard_server.engines.eviction_order import EvictionOrder, KvOwner


@functools.lru_cache(maxsize=2048)
def hashes_of(model: str, salt: str, prompt: tuple[int, ...], adapter: Adapter | None, block_size: int) -> list[int]:
    return block_hashes(prompt, block_size, root_hash(model, "" if adapter is None else adapter.checksum, salt))


def prompt_hashes(request: Request, block_size: int) -> Sequence[int]:
    prompt = tuple(request.prompt_token_ids)
    return hashes_of(request.model, request.cache_salt, prompt, request.adapter, block_size)


class BlockCache:
    """The cached block hashes. Shares protect them as in the engines, by the same code."""

    def __init__(self, shape: ShardShape) -> None:
        self._shape = shape
        self._order = EvictionOrder(shape.num_blocks)
        self.blocks: dict[int, KvOwner] = {}
        """Hash → owner; the least recently used one is the first."""

    def count_overlap(self, hashes: Iterable[int]) -> int:
        """The number of leading blocks that are cached."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self.blocks:
                break
            count += 1
        return count

    def clear(self) -> None:
        """Forget all blocks, and all shares."""
        self._order = EvictionOrder(self._shape.num_blocks)
        self.blocks.clear()

    def store(self, hashes: Sequence[int], share: KvShare | None = None, now: float = 0.0) -> list[KvChange]:
        """Store the blocks of a sequence with this share, as many as there is room for. Returns the changes in order:
        evictions first, then the new blocks."""
        blocks, order = self.blocks, self._order
        owner = order.owner_of(share, now)
        for block_hash in hashes:
            if block_hash in blocks:
                self._use(block_hash, owner)
        num_room = self._shape.num_blocks - len(blocks) + order.num_available_to(owner)
        new = [block_hash for block_hash in hashes if block_hash not in blocks][:num_room]
        removed: list[int] = []
        for block_hash in new:
            if len(blocks) == self._shape.num_blocks:
                evicted = order.evict(owner)
                del blocks[evicted]
                removed.append(evicted)
            blocks[block_hash] = owner
            order.add_used(owner)
        for block_hash in hashes:
            if block_hash in blocks:
                order.add_unused(block_hash, blocks[block_hash])
        changes = [KvChange(removed=removed)] if removed else []
        return [*changes, KvChange(stored=new)] if new else []

    def _use(self, block_hash: int, owner: KvOwner) -> None:
        """Note the use of a block, which becomes the owner's if it belonged to none with a share."""
        before = self.blocks.pop(block_hash)
        self._order.use(block_hash, before)
        if owner.takes_over(before):
            self._order.drop_used(before)
            self._order.add_used(owner)
            before = owner
        self.blocks[block_hash] = before
