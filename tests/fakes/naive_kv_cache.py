"""A prefix cache that does its accounting block by block, from which tools.simulate.fleet.kv_cache must be
indistinguishable."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass
class NaiveLease:
    hashes: Sequence[int]
    num_cached: int
    num_private: int


class NaiveKvCache:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_refs: dict[int, int] = {}
        self.unused: list[int] = []
        """Cached blocks that no sequence holds, least recently used first."""
        self.num_free = num_blocks
        self.evicted: list[int] = []

    @property
    def num_available(self) -> int:
        return self.num_free + len(self.unused)

    def admit(self, hashes: Sequence[int], num_reusable: int, num_blocks: int) -> NaiveLease | None:
        matched: list[int] = []
        for block_hash in hashes[:num_reusable]:
            if block_hash not in self.num_refs:
                break
            matched.append(block_hash)
        num_private = num_blocks - len(matched)
        if num_private > self.num_available - sum(block_hash in self.unused for block_hash in matched):
            return None
        for block_hash in matched:
            self._hold(block_hash)
        while self.num_free < num_private:
            victim = self.unused.pop(0)
            del self.num_refs[victim]
            self.evicted.append(victim)
            self.num_free += 1
        self.num_free -= num_private
        return NaiveLease(hashes, len(matched), num_private)

    def store(self, lease: NaiveLease, num_computed: int) -> list[int]:
        new: list[int] = []
        for block_hash in lease.hashes[lease.num_cached : num_computed]:
            lease.num_private -= 1
            lease.num_cached += 1
            if block_hash in self.num_refs:
                self._hold(block_hash)
                self.num_free += 1
            else:
                self.num_refs[block_hash] = 1
                new.append(block_hash)
        return new

    def free(self, lease: NaiveLease) -> None:
        self.num_free += lease.num_private
        for block_hash in reversed(lease.hashes[: lease.num_cached]):
            self.num_refs[block_hash] -= 1
            if not self.num_refs[block_hash]:
                self.unused.append(block_hash)

    def take_evicted(self) -> list[int]:
        evicted, self.evicted = self.evicted, []
        return evicted

    def _hold(self, block_hash: int) -> None:
        if not self.num_refs[block_hash]:
            self.unused.remove(block_hash)
        self.num_refs[block_hash] += 1
