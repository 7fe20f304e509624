"""The block pool against a naive model that knows prefixes, references and least-recent use, and nothing else."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloom_common.text.block_hash import root_hash
from shard_server.engines.base import BlockRemoved, BlockStored
from shard_server.engines.torch_engine.block_pool import BlockKey, BlockPool, extend_block_keys
from tests.examples import num_examples

NUM_BLOCKS = 7
BLOCK_SIZE = 2
ROOTS = (root_hash("m"), root_hash("m", cache_salt="tenant"))

Prefix = tuple[int, ...]
"""The root, then all tokens up to the end of a block: what a cached block stands for."""


class PoolMachine(RuleBasedStateMachine):
    """Sequences come (reusing what is cached), compute, and go; two may compute the same at once."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.memory: dict[int, Prefix] = {}  # what the KV of each block was computed for
        self.live: list[tuple[list[int], list[int], int, int]] = []  # tokens, block table, num cached, root
        self.cached: set[Prefix] = set()
        self.lru: list[Prefix] = []
        self.replayed: set[int] = set()
        self.hashes: dict[Prefix, int] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), root=st.sampled_from(ROOTS))
    def begin(self, tokens: list[int], root: int) -> None:
        keys = keys_of(tokens, root)
        matched = self.pool.match_prefix(keys, root)
        prefixes = [(root, *tokens[: (i + 1) * BLOCK_SIZE]) for i in range(len(keys))]
        num_expected = next((i for i, prefix in enumerate(prefixes) if prefix not in self.cached), len(prefixes))
        assert len(matched) == num_expected
        assert [self.memory[block_id] for block_id in matched] == prefixes[:num_expected]
        num_new = -(-len(tokens) // BLOCK_SIZE) - len(matched)
        if num_new > self.pool.num_available - self.pool.num_evictable(matched):
            return
        self.pool.reference(matched)
        self.lru = [prefix for prefix in self.lru if prefix not in prefixes[:num_expected]]
        num_free = NUM_BLOCKS - len(self.cached) - self._num_private()
        for _ in range(max(0, num_new - num_free)):
            self.cached.remove(self.lru.pop(0))
        table = matched + self.pool.allocate(num_new)
        for index, prefix in enumerate(prefixes):
            self.memory[table[index]] = prefix
            self.hashes[prefix] = keys[index].block_hash
        self.live.append((tokens, table, len(matched), root))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """Some more of a sequence's blocks are computed and offered."""
        index = data.draw(st.integers(0, len(self.live) - 1))
        tokens, table, num_cached, root = self.live[index]
        keys = keys_of(tokens, root)
        end = data.draw(st.integers(num_cached, len(keys)))
        assert self.pool.cache_blocks(table, num_cached, keys[num_cached:end], root) == end - num_cached
        for i in range(num_cached, end):
            prefix = (root, *tokens[: (i + 1) * BLOCK_SIZE])
            self.cached.add(prefix)
            if prefix in self.lru:
                self.lru.remove(prefix)
            assert self.memory[table[i]] == prefix, "switched to a block that holds something else"
        self.live[index] = (tokens, table, end, root)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        tokens, table, num_cached, root = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.free(table)
        held = self._references()
        for i in reversed(range(num_cached)):
            prefix = (root, *tokens[: (i + 1) * BLOCK_SIZE])
            if not held[prefix]:
                self.lru.append(prefix)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity(table for _, table, _, _ in self.live)
        for event in self.pool.take_events():
            assert isinstance(event, BlockStored | BlockRemoved)
            hashes = set(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not hashes & self.replayed, "stored twice"
                self.replayed |= hashes
            else:
                assert hashes <= self.replayed, "removed without having been stored"
                self.replayed -= hashes
        assert self.replayed == self.pool.cached_hashes == {self.hashes[prefix] for prefix in self.cached}
        assert self.pool.num_available == NUM_BLOCKS - self._num_private() - (len(self.cached) - len(self.lru))

    def _num_private(self) -> int:
        return sum(len(table) - num_cached for _, table, num_cached, _ in self.live)

    def _references(self) -> Counter[Prefix]:
        return Counter(
            (root, *tokens[: (i + 1) * BLOCK_SIZE])
            for tokens, _, num_cached, root in self.live
            for i in range(num_cached)
        )


def keys_of(tokens: list[int], root: int) -> list[BlockKey]:
    keys: list[BlockKey] = []
    extend_block_keys(keys, tokens, BLOCK_SIZE, root)
    return keys


PoolMachine.TestCase.settings = settings(max_examples=num_examples(150), stateful_step_count=40, deadline=None)
TestBlockPool = PoolMachine.TestCase
