"""The prefix cache of a modelled shard, case by case."""

from __future__ import annotations

from tools.simulate.fleet.kv_cache import ModelledKvCache


def _run_to_end(cache: ModelledKvCache, hashes: list[int], num_blocks: int | None = None) -> int:
    """Admit, compute and free a prompt; returns how many blocks it found."""
    lease = cache.admit(hashes, len(hashes), num_blocks or len(hashes))
    assert lease is not None
    num_found = lease.num_cached
    cache.store(lease, len(hashes))
    cache.free(lease)
    return num_found


def test_a_prompt_finds_what_was_computed_before_it() -> None:
    """Blocks stay cached after their sequence's end, and a prompt that branches off finds the common part."""
    cache = ModelledKvCache(10)
    assert _run_to_end(cache, [1, 2, 3]) == 0
    assert _run_to_end(cache, [1, 2, 3, 4]) == 3
    assert _run_to_end(cache, [1, 2, 5]) == 2
    assert sorted(cache.cached_hashes()) == [1, 2, 3, 4, 5]


def test_blocks_are_not_reusable_before_they_are_computed() -> None:
    """A second prompt admitted while the first is in prefill finds only the chunks that are done."""
    cache = ModelledKvCache(10)
    lease = cache.admit([1, 2, 3, 4], 4, 4)
    assert lease is not None
    assert cache.store(lease, 2) == [1, 2]
    second = cache.admit([1, 2, 3, 4], 4, 4)
    assert second is not None
    assert second.num_cached == 2


def test_copies_of_blocks_computed_twice_are_freed() -> None:
    """Two sequences that computed one prefix at once share it from then on."""
    cache = ModelledKvCache(10)
    first, second = cache.admit([1, 2], 2, 2), cache.admit([1, 2], 2, 2)
    assert first is not None
    assert second is not None
    assert cache.store(first, 2) == [1, 2]
    assert cache.num_available == 6
    assert list(cache.store(second, 2)) == []
    assert cache.num_available == 8
    cache.check_integrity([first, second])


def test_the_least_recently_used_tail_goes_first() -> None:
    """Eviction takes the oldest prompt's last blocks first, so that what is left of it can still be found."""
    cache = ModelledKvCache(6)
    _run_to_end(cache, [1, 2, 3])
    _run_to_end(cache, [7, 8])
    _run_to_end(cache, [20, 21, 22])
    assert sorted(cache.take_evicted()) == [2, 3]
    assert cache.count_cached([1, 2, 3], 3) == 1


def test_reuse_makes_a_prompt_recently_used() -> None:
    """A prompt used again outlives one that was stored after it."""
    cache = ModelledKvCache(4)
    _run_to_end(cache, [1, 2])
    _run_to_end(cache, [7, 8])
    _run_to_end(cache, [1, 2])
    _run_to_end(cache, [20])
    assert cache.take_evicted() == [8]


def test_held_blocks_are_never_evicted() -> None:
    """A sequence is rejected rather than given blocks that another one uses."""
    cache = ModelledKvCache(4)
    lease = cache.admit([1, 2], 2, 3)
    assert lease is not None
    cache.store(lease, 2)
    assert cache.admit([7, 8], 2, 2) is None
    assert cache.take_evicted() == []
    cache.free(lease)
    assert cache.admit([7, 8], 2, 4) is not None
    assert sorted(cache.take_evicted()) == [1, 2]


def test_blocks_about_to_be_reused_do_not_count_as_available() -> None:
    """A prompt cannot both reuse its cached blocks and have them evicted for its own tail."""
    cache = ModelledKvCache(4)
    _run_to_end(cache, [1, 2, 3])
    assert cache.num_available == 4
    assert cache.admit([1, 2, 3, 4], 4, 5) is None
    assert cache.admit([1, 2, 3, 4], 4, 4) is not None
    assert cache.take_evicted() == []


def test_the_tail_can_be_excluded_from_reuse() -> None:
    """A prompt that is cached to the last token still computes its last block."""
    cache = ModelledKvCache(4)
    _run_to_end(cache, [1, 2, 3])
    lease = cache.admit([1, 2, 3], 2, 3)
    assert lease is not None
    assert lease.num_cached == 2
    assert list(cache.store(lease, 3)) == []
    cache.check_integrity([lease])
