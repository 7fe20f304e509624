"""The simulated engine's block accounting under any order of admissions, growth and frees."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shard_server.engines.base import BlockRemoved, BlockStored
from shard_server.engines.sim_blocks import SimBlockPool
from tests.examples import num_examples

NUM_BLOCKS = 8
# A sequence's chain of hashes is a path in a small tree, so that prefixes are shared often.
paths = st.lists(st.integers(0, 1), min_size=1, max_size=5)
moves = st.lists(st.tuples(st.sampled_from(["admit", "free"]), paths, st.integers(0, 5)), max_size=40)


def chain(path: list[int]) -> list[int]:
    return [hash(tuple(path[: i + 1])) & 0xFFFF_FFFF for i in range(len(path))]


@settings(max_examples=num_examples(150), deadline=None)
@given(moves)
def test_blocks_add_up_and_events_replay_parents_first(script: list[tuple[str, list[int], int]]) -> None:
    """No block is lost or doubled; a cached block's parent is cached; events say exactly what is cached."""
    pool = SimBlockPool(NUM_BLOCKS)
    held: list[list[int]] = []
    cached: set[int] = set()
    parents: dict[int, int] = {}
    for move, path, number in script:
        if move == "admit":
            hashes = chain(path)
            parents.update(zip(hashes, [0, *hashes], strict=False))
            reused = hashes[: pool.count_cached(hashes)]
            pool.reference(reused)
            if len(hashes) - len(reused) > pool.num_available:
                pool.free(reused, 0)
            else:
                pool.allocate(len(hashes) - len(reused))
                pool.store(hashes[len(reused) :])
                held.append(hashes)
        elif held:
            pool.free(held.pop(number % len(held)), 0)
        for event in pool.take_events():
            match event:
                case BlockStored(hashes):
                    assert cached.isdisjoint(hashes)
                    cached.update(hashes)
                case BlockRemoved(hashes):
                    assert cached.issuperset(hashes)
                    cached.difference_update(hashes)
                case _:
                    raise AssertionError(event)
        in_use = {block_hash for hashes in held for block_hash in hashes}
        assert in_use <= cached
        assert pool.num_available == NUM_BLOCKS - len(in_use)
        assert all(not parents[block_hash] or parents[block_hash] in cached for block_hash in cached)
