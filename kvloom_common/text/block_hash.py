"""Chained hashes of KV blocks, by which routers and shards identify cached prefixes.

block_hash = xxh3_64(the block's token ids as little-endian uint32, seed = the parent's block_hash). The first block's
parent is `root_hash(model, adapter, cache_salt)`, so that models, adapters and tenants never share a hash. 8,192 ids
take about 45 CPU-microseconds. xxh3 is not collision-proof: an engine must compare token ids before it reuses KV; a
router that is misled costs speed, never correctness.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Iterable, Sequence

import xxhash

BYTES_PER_TOKEN = 4


def root_hash(model: str, adapter: str = "", cache_salt: str = "") -> int:
    """The parent of a sequence's first block: 64 bits that name (model, adapter, cache_salt).

    `adapter` is the checksum of the adapter that computes the sequence: no other adapter, no earlier one of the same
    name and not the model alone ("") computes the same KV. `cache_salt`: see kvloom_common/access/kv_shares.py."""
    return xxhash.xxh3_64_intdigest("\0".join((model, adapter, cache_salt)).encode())


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian uint32. Raises OverflowError for ids outside [0, 2**32)."""
    return array("I", token_ids).tobytes()


def block_hash(parent_hash: int, block_token_ids: Iterable[int]) -> int:
    """The hash of one full block."""
    return xxhash.xxh3_64_intdigest(token_bytes(block_token_ids), seed=parent_hash)


def block_hashes(token_ids: Sequence[int], block_size: int, root: int) -> list[int]:
    """The hashes of all full blocks of `token_ids`, first block first; a partial last block has none.

    `block_size` is in tokens, `root` the result of `root_hash`.
    """
    data = token_bytes(token_ids)
    digest = xxhash.xxh3_64_intdigest
    block = _block_of(block_size)
    parent = root
    # Only the hashing itself is done per block, because a prompt has hundreds of them.
    return [parent := digest(ids, parent) for (ids,) in block.iter_unpack(data[: len(data) // block.size * block.size])]


@functools.lru_cache(maxsize=64)
def _block_of(block_size: int) -> struct.Struct:
    return struct.Struct(f"{block_size * BYTES_PER_TOKEN}s")
