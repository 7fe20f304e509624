"""Predicts which KV blocks an engine without KV events has: those of the prompts that it computed last. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from router.core.events import KvChange


class PredictedBlocks:
    """The blocks of one engine, the least recently used first, at most as many as it has."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def store(self, block_hashes: Sequence[int]) -> list[KvChange]:
        """A prompt with these blocks was computed. Returns what changes: the end of a prompt is evicted before its
        beginning, as engines do."""
        block_hashes = block_hashes[: self._max_blocks]
        blocks = self._blocks
        stored = [block_hash for block_hash in block_hashes if block_hash not in blocks]
        for block_hash in reversed(block_hashes):
            blocks[block_hash] = None
            blocks.move_to_end(block_hash)
        removed = [blocks.popitem(last=False)[0] for _ in range(len(blocks) - self._max_blocks)]
        return [KvChange(stored=stored, removed=removed)] if stored or removed else []
