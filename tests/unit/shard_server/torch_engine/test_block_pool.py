"""What the property test of the block pool cannot reach: collisions, and keys that grow token by token."""

from __future__ import annotations

from kvloom_common.text.block_hash import block_hashes
from shard_server.engines.torch_engine.block_pool import BlockKey, BlockPool, extend_block_keys

ROOT = 7


def test_a_hash_collision_is_never_reused() -> None:
    """xxh3 collides: another content under the same hash must not be matched, stored or reported."""
    pool = BlockPool(num_blocks=4, block_size=2)
    table = pool.allocate(1)
    assert pool.cache_blocks(table, 0, [BlockKey(99, b"first")], ROOT) == 1
    pool.take_events()

    impostor = BlockKey(99, b"other")
    assert pool.match_prefix([impostor], ROOT) == []
    other_table = pool.allocate(2)
    assert pool.cache_blocks(other_table, 0, [impostor, BlockKey(100, b"child")], ROOT) == 0
    assert pool.take_events() == []
    pool.check_integrity([table, other_table])


def test_the_same_tokens_behind_another_parent_are_another_block() -> None:
    """KV depends on everything before it; equal hash and tokens do not suffice when the parent is not the same."""
    pool = BlockPool(num_blocks=4, block_size=2)
    table = pool.allocate(2)
    parent, child = BlockKey(1, b"parent"), BlockKey(2, b"child")
    assert pool.cache_blocks(table, 0, [parent, child], ROOT) == 2
    assert pool.match_prefix([parent, child], ROOT) == table
    assert pool.match_prefix([parent, child], ROOT + 1) == []
    assert pool.match_prefix([child], ROOT) == []


def test_twins_computed_at_once_become_one_block() -> None:
    """Two sequences that computed the same prefix hold it once afterwards: the cache is a tree, memory is freed."""
    pool = BlockPool(num_blocks=4, block_size=2)
    keys = [BlockKey(1, b"a"), BlockKey(2, b"b")]
    first, second = pool.allocate(2), pool.allocate(2)
    assert pool.num_available == 0
    pool.cache_blocks(first, 0, keys, ROOT)
    pool.cache_blocks(second, 0, keys, ROOT)
    assert first == second
    assert pool.num_available == 2
    pool.check_integrity([first, second])


def test_a_sequences_tail_is_evicted_before_its_head() -> None:
    """The head of a prompt is what others share; evicting it first would strand the rest."""
    pool = BlockPool(num_blocks=3, block_size=2)
    table = pool.allocate(3)
    keys = [BlockKey(1, b"a"), BlockKey(2, b"b"), BlockKey(3, b"c")]
    pool.cache_blocks(table, 0, keys, ROOT)
    pool.free(table)
    pool.allocate(1)
    assert pool.cached_hashes == {1, 2}
    pool.allocate(1)
    assert pool.cached_hashes == {1}


def test_keys_that_grow_equal_those_made_at_once() -> None:
    """Generated tokens' blocks must get the hashes a later prompt with the same tokens will have."""
    tokens = list(range(50))
    grown: list[BlockKey] = []
    for end in range(len(tokens) + 1):
        extend_block_keys(grown, tokens[:end], 4, ROOT)
    assert [key.block_hash for key in grown] == block_hashes(tokens, 4, ROOT)
