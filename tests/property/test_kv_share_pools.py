"""Both block pools with shares: whichever tenants use the same blocks, none outlives the one before it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom_common.kv_share import KvShare
from shard_server.engines.base import BlockRemoved, BlockStored
from shard_server.engines.eviction_order import KvOwner
from shard_server.engines.sim_blocks import SimBlockPool
from shard_server.engines.torch_engine.block_pool import BlockKey, BlockPool, extend_block_keys
from tests.examples import num_examples

NUM_BLOCKS = 12
BLOCK_SIZE = 2
ROOT = 1
"""One for all: tenants with the same cache scope share blocks."""

shares = st.one_of(st.none(), st.builds(KvShare, st.integers(1, 3), st.sampled_from((10, 30, 60))))
moves = st.lists(
    st.tuples(
        st.sampled_from(("begin", "begin", "end")),
        st.lists(st.integers(0, 1), min_size=1, max_size=9),
        shares,
        st.sampled_from((0.0, 0.0, 4000.0)),
        st.integers(0, 9),
    ),
    max_size=40,
)
Moves = list[tuple[str, list[int], KvShare | None, float, int]]


@settings(max_examples=num_examples(150), deadline=None)
@given(moves)
def test_the_torch_engines_pool(script: Moves) -> None:
    """Integrity after each move, and a sequence gets what it was promised."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    live: list[list[int]] = []
    now = 0.0
    for move, tokens, share, seconds, number in script:
        now += seconds
        if move == "begin":
            owner = pool.order.owner_of(share, now)
            keys: list[BlockKey] = []
            extend_block_keys(keys, tokens, BLOCK_SIZE, ROOT)
            matched = pool.match_prefix(keys, ROOT)
            num_new = -(-len(tokens) // BLOCK_SIZE) - len(matched)
            num_available = pool.num_available if number % 2 else pool.num_available_to(owner)
            num_last_resorts = pool.order.num_last_resorts
            if num_new <= num_available - pool.num_evictable(matched):
                pool.reference(matched, owner)
                table = matched + pool.allocate(num_new, owner)
                pool.cache_blocks(table, len(matched), keys[len(matched) :], ROOT)
                live.append(table)
                assert number % 2 or pool.order.num_last_resorts == num_last_resorts
        elif live:
            pool.free(live.pop(number % len(live)))
        pool.check_integrity(live)


@settings(max_examples=num_examples(150), deadline=None)
@given(moves)
def test_the_simulated_engines_pool(script: Moves) -> None:
    """Events say what is cached, and with a block the one before it."""
    pool = SimBlockPool(NUM_BLOCKS)
    held: list[tuple[list[int], KvOwner]] = []
    cached: set[int] = set()
    parents: dict[int, int] = {}
    now = 0.0
    for move, path, share, seconds, number in script:
        now += seconds
        if move == "begin":
            owner = pool.order.owner_of(share, now)
            hashes = [hash(tuple(path[: i + 1])) & 0xFFFF_FFFF for i in range(len(path))]
            parents.update(zip(hashes, [0, *hashes], strict=False))
            reused = hashes[: pool.count_cached(hashes)]
            pool.reference(reused, owner)
            num_new = len(hashes) - len(reused)
            if num_new > (pool.num_available if number % 2 else pool.num_available_to(owner)):
                pool.free(reused, 0, owner)
            else:
                pool.allocate(num_new, owner)
                pool.store(hashes[len(reused) :], owner, reused[-1] if reused else None)
                held.append((hashes, owner))
        elif held:
            pool.free(held[number % len(held)][0], 0, held.pop(number % len(held))[1])
        for event in pool.take_events():
            if isinstance(event, BlockStored):
                cached.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                cached.difference_update(event.block_hashes)
        in_use = {block_hash for hashes, _ in held for block_hash in hashes}
        pool.order.check_integrity()
        assert in_use <= cached
        assert pool.num_available == NUM_BLOCKS - len(in_use)
        assert all(not parents[block_hash] or parents[block_hash] in cached for block_hash in cached)
