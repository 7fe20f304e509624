"""Fills a prefix index as a fleet does: with conversations of one length, spread over the shards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from router.core.events import KvChange
from router.core.prefix_index.prefix_index import PrefixIndex

PREFILL_BLOCKS: Final = 128
"""Blocks of a prompt that one engine step stores: a chunk of 2,048 tokens in blocks of 16."""
GENERATED_SHARE: Final = 1 / 16
"""Share of a conversation's blocks that are its last answer. They are stored one by one, between those of other
conversations."""
DECODING_TOGETHER: Final = 16


def chain(seed: int, num_blocks: int) -> list[int]:
    """The hashes of a prompt's blocks: the same for the same seed, but new int objects, as if just computed."""
    draw = random.Random(seed).getrandbits
    return [draw(64) for _ in range(num_blocks)]


class FilledIndex:
    """Shards `shard-0` ... hold `num_blocks` blocks in all, and no two blocks are alike. Conversation k is `chain(k,
    ...)` and lies on shard k modulo the number of shards. Only the index keeps the hashes."""

    def __init__(self, num_shards: int, num_blocks: int, prompt_blocks: int, seed: int) -> None:
        self.index = PrefixIndex()
        self.shard_ids = [f"shard-{number}" for number in range(num_shards)]
        self.prompt_blocks = prompt_blocks
        self.num_conversations = num_blocks // prompt_blocks
        self.num_blocks = self.num_conversations * prompt_blocks
        self._seed = seed << 32
        self._numbers = dict.fromkeys(self.shard_ids, 0)
        for shard_id in self.shard_ids:
            self.add_shard(shard_id)

    def add_shard(self, shard_id: str, block_hashes: Sequence[int] = ()) -> None:
        self.index.add_shard(shard_id, 2 * (self.num_blocks + len(block_hashes)), 0.0)
        self.index.apply_snapshot(shard_id, 0, block_hashes)
        self._numbers[shard_id] = 0

    def conversation(self, number: int) -> list[int]:
        return chain(self._seed + number, self.prompt_blocks)

    def fill(self) -> None:
        num_shards = len(self.shard_ids)
        num_prompt = int(self.prompt_blocks * (1 - GENERATED_SHARE))
        group = DECODING_TOGETHER * num_shards
        for begin in range(0, self.num_conversations, group):
            decoding: list[tuple[str, list[int]]] = []
            for number in range(begin, min(begin + group, self.num_conversations)):
                shard_id = self.shard_ids[number % num_shards]
                hashes = self.conversation(number)
                for start in range(0, num_prompt, PREFILL_BLOCKS):
                    self.store(shard_id, hashes[start : min(start + PREFILL_BLOCKS, num_prompt)])
                decoding.append((shard_id, hashes[num_prompt:]))
            for position in range(self.prompt_blocks - num_prompt):
                for shard_id, generated in decoding:
                    self.store(shard_id, generated[position : position + 1])

    def store(self, shard_id: str, block_hashes: Sequence[int]) -> None:
        self.change(shard_id, KvChange(stored=block_hashes))

    def remove(self, shard_id: str, block_hashes: Sequence[int]) -> None:
        self.change(shard_id, KvChange(removed=block_hashes))

    def change(self, shard_id: str, change: KvChange) -> None:
        self._numbers[shard_id] += 1
        self.index.apply_events(shard_id, self._numbers[shard_id], (change,), 0.0)
