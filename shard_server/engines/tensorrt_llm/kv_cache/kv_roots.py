"""Finds the root hash (model and tenant) that a chain of TensorRT-LLM's blocks belongs to.

The events of 1.2.1 carry tokens but no salt: first blocks of two tenants with the same tokens look alike. So every
submitted prompt leaves a trace here, and a chain is matched against the traces:

- tokens of the first block that were submitted under one root only: exact;
- under several roots: the one under which most blocks of the chain were submitted, exact as soon as the event's blocks
  reach beyond what the tenants have in common;
- still equal (one common system prompt and nothing else): in the order of submission, each root once. Two tenants may
  then be confused until both have been stored, which costs speed but never correctness;
- never submitted, or forgotten (the traces are bounded): unknown, and nothing is reported to routers.

Newer versions report the salt, and none of this is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import xxhash

from kvloom_common.text.block_hash import block_hashes, token_bytes

MAX_ROOTS_PER_PREFIX: Final = 256


class RootLedger:
    """Remembers at most `max_traces` first blocks, and as many block hashes."""

    def __init__(self, block_size: int, max_traces: int) -> None:
        self._block_size = block_size
        self._max_traces = max_traces
        self._roots: OrderedDict[bytes, dict[int, int]] = OrderedDict()
        """First block's tokens → root → how many stored chains are matched to it."""
        self._submitted: OrderedDict[int, None] = OrderedDict()
        """Hashes of the blocks of submitted prompts."""

    def remember(self, token_ids: Sequence[int], root: int) -> None:
        """Record a submitted prompt. A prompt shorter than a block leaves no trace: call this again when it has
        grown."""
        if len(token_ids) < self._block_size:
            return
        first = token_bytes(token_ids[: self._block_size])
        roots = self._roots.setdefault(first, {})
        roots.setdefault(root, 0)
        if len(roots) > MAX_ROOTS_PER_PREFIX:
            del roots[next(iter(roots))]
        self._roots.move_to_end(first)
        for hashed in block_hashes(token_ids, self._block_size, root):
            self._submitted[hashed] = None
            self._submitted.move_to_end(hashed)
        while len(self._roots) > self._max_traces:
            self._roots.popitem(last=False)
        while len(self._submitted) > self._max_traces:
            self._submitted.popitem(last=False)

    def claim(self, chain: Sequence[bytes], cache_salt: str | None = None) -> int | None:
        """The root of a stored chain, given its blocks' tokens; None if unknown. Call `release` when the chain is
        removed."""
        roots = self._roots.get(chain[0], {})
        root = _root_of_salt(cache_salt)
        if root is None:
            if not roots:
                return None
            root = next(iter(roots)) if len(roots) == 1 else self._likeliest(roots, chain)
        if root in roots:
            roots[root] += 1
        return root

    def release(self, first: bytes, root: int) -> None:
        """A chain's first block was removed."""
        roots = self._roots.get(first)
        if roots and roots.get(root):
            roots[root] -= 1

    def _likeliest(self, roots: dict[int, int], chain: Sequence[bytes]) -> int:
        """The root with the most submitted blocks; then the fewest matched chains; then the earliest submission."""
        return min(roots, key=lambda root: (-self._num_submitted(root, chain), roots[root]))

    def _num_submitted(self, root: int, chain: Sequence[bytes]) -> int:
        hashed = root
        for count, tokens in enumerate(chain):
            hashed = xxhash.xxh3_64_intdigest(tokens, seed=hashed)
            if hashed not in self._submitted:
                return count
        return len(chain)


def _root_of_salt(cache_salt: str | None) -> int | None:
    """The inverse of request_fields.cache_salt_of; None for salts that are not ours."""
    if cache_salt is None or len(cache_salt) != 16:
        return None
    try:
        return int(cache_salt, 16)
    except ValueError:
        return None
