"""The prefix cache of a shard: the truth with which the routers' indexes are compared."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from kvloom.models.adapters import Adapter
from kvloom.text.block_hash import block_hashes, root_hash
from router.core.events import KvChange, Request
from tools.dst.scenario import ShardShape


@functools.lru_cache(maxsize=2048)
def hashes_of(model: str, salt: str, prompt: tuple[int, ...], adapter: Adapter | None, block_size: int) -> list[int]:
    return block_hashes(prompt, block_size, root_hash(model, "" if adapter is None else adapter.checksum, salt))


def prompt_hashes(request: Request, block_size: int) -> Sequence[int]:
    prompt = tuple(request.prompt_token_ids)
    return hashes_of(request.model, request.cache_salt, prompt, request.adapter, block_size)


class BlockCache:
    """The cached block hashes, least recently used first."""

    def __init__(self, shape: ShardShape) -> None:
        self._shape = shape
        self.blocks: dict[int, None] = {}

    def count_overlap(self, hashes: Iterable[int]) -> int:
        """The number of leading blocks that are cached."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self.blocks:
                break
            count += 1
        return count

    def store(self, hashes: Sequence[int]) -> list[KvChange]:
        """Store blocks. Returns the changes in order: evictions first, then the new blocks."""
        blocks = self.blocks
        for block_hash in hashes:
            if block_hash in blocks:
                del blocks[block_hash]
                blocks[block_hash] = None
        new = [block_hash for block_hash in hashes if block_hash not in blocks]
        if not new:
            return []
        removed = list(blocks)[: max(0, len(blocks) + len(new) - self._shape.num_blocks)]
        for block_hash in removed:
            del blocks[block_hash]
        blocks.update(dict.fromkeys(new))
        changes = [KvChange(removed=removed)] if removed else []
        return [*changes, KvChange(stored=new)]
