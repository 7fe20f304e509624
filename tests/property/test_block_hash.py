"""Routers and shards identify blocks by their hashes: both must compute the same from the same tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.text.block_hash import block_hash, block_hashes, root_hash

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@given(token_lists, st.sampled_from([1, 4, 16]))
def test_the_chain_equals_hashing_block_by_block(tokens: list[int], block_size: int) -> None:
    """A router hashes a whole prompt, an engine one block at a time."""
    root = root_hash("model")
    parent, chain = root, []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = block_hash(parent, tokens[start : start + block_size])
        chain.append(parent)
    assert block_hashes(tokens, block_size, root) == chain
    assert len(chain) == len(tokens) // block_size


@given(token_lists, token_lists)
def test_shared_prefixes_share_hashes(first: list[int], second: list[int]) -> None:
    """Hashes agree exactly as far as full blocks of tokens agree."""
    root = root_hash("model")
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    a, b = block_hashes(first, 4, root), block_hashes(second, 4, root)
    shared = common // 4
    assert a[:shared] == b[:shared]
    assert not set(a[shared:]) & set(b[shared:])


def test_models_adapters_and_tenants_never_share() -> None:
    """Tenant isolation: equal prompts of two tenants must not share cache entries."""
    roots = {root_hash("m"), root_hash("m", "a"), root_hash("m", "", "a"), root_hash("m", "a", "b"), root_hash("ma")}
    assert len(roots) == 5


def test_the_hash_never_changes() -> None:
    """Routers and shards of different versions run side by side in a rolling upgrade."""
    assert block_hashes(range(32), 16, root_hash("model", "", "tenant")) == [
        14477110799800037627,
        8003470771966520985,
    ]
