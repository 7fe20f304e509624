"""Compares the cache of runs in the simulator with a cache that tracks every block."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import num_examples
from tests.fakes.naive_kv_cache import NaiveKvCache
from tools.simulate.fleet.kv_cache import ModelledKvCache

_PROMPTS = st.lists(st.integers(0, 2), max_size=12)
_OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), _PROMPTS, st.integers(0, 12), st.integers(0, 4)),
        st.tuples(st.just("store"), st.integers(0, 7), st.integers(0, 12)),
        st.tuples(st.just("free"), st.integers(0, 7)),
    ),
    max_size=60,
)


def _chain(symbols: list[int], known: dict[tuple[int, ...], int]) -> list[int]:
    """Hashes, each of which stands for its whole prefix."""
    return [known.setdefault(tuple(symbols[: end + 1]), 1000 + len(known)) for end in range(len(symbols))]


@settings(max_examples=num_examples(300), deadline=None)
@given(num_blocks=st.integers(4, 40), operations=_OPERATIONS)
def test_runs_of_blocks_behave_like_single_blocks(num_blocks, operations) -> None:
    """Otherwise the hit rates of the simulator would not be those of a real shard."""
    cache, naive = ModelledKvCache(num_blocks), NaiveKvCache(num_blocks)
    known: dict[tuple[int, ...], int] = {}
    leases = []
    for operation in operations:
        if operation[0] == "admit":
            _, symbols, num_reusable, num_more = operation
            hashes = _chain(symbols, known)
            num_cached = cache.count_cached(hashes, len(hashes))
            assert all(h in naive.num_refs for h in hashes[:num_cached])
            assert num_cached == len(hashes) or hashes[num_cached] not in naive.num_refs
            lease = cache.admit(hashes, num_reusable, len(hashes) + num_more)
            expected = naive.admit(hashes, num_reusable, len(hashes) + num_more)
            assert (lease is None) == (expected is None)
            if lease is not None:
                assert lease.num_cached == expected.num_cached
                leases.append((lease, expected))
        elif leases:
            lease, expected = leases[operation[1] % len(leases)]
            if operation[0] == "store":
                num_computed = max(lease.num_cached, min(operation[2], len(lease.hashes)))
                assert list(cache.store(lease, num_computed)) == naive.store(expected, num_computed)
            else:
                leases.remove((lease, expected))
                cache.free(lease)
                naive.free(expected)
        assert sorted(cache.take_evicted()) == sorted(naive.take_evicted())
        assert cache.num_available == naive.num_available
        assert sorted(cache.cached_hashes()) == sorted(naive.num_refs)
        cache.check_integrity([lease for lease, _ in leases])
        assert [lease.num_private for lease, _ in leases] == [expected.num_private for _, expected in leases]
