"""Fetching KV blocks from another shard instead of computing them: a modelled option.

A shard takes in one transfer at a time, at the full bandwidth of its link; what it is copied from is not slowed down.
"""

from __future__ import annotations

from collections.abc import Sequence as Caches

from tools.simulate.fleet.fleet_model import Profile
from tools.simulate.fleet.kv_cache import KvCache
from tools.simulate.fleet.sequence import Sequence
from tools.simulate.fleet.step_time import prefill_seconds


class PeerLink:
    """One shard's way to the blocks of the others."""

    def __init__(
        self, profile: Profile, block_size: int, bytes_per_second: float, slowness: float, peers: Caches[KvCache]
    ) -> None:
        self._profile = profile
        self._block_size = block_size
        self._seconds_per_token = profile.kv_bytes_per_token / bytes_per_second
        self._slowness = slowness
        self._peers = peers
        self._free_at = 0.0

    def fetch(self, sequence: Sequence, num_local_blocks: int, now: float) -> tuple[int, float] | None:
        """Begin a transfer, if some peer holds more of the prompt's prefix and sending it is quicker than computing it:
        how many leading blocks will be there, and when. None: compute."""
        limit = (sequence.num_prompt_tokens - 1) // self._block_size
        num_blocks = max((peer.count_cached(sequence.hashes, limit) for peer in self._peers), default=0)
        if num_blocks <= num_local_blocks:
            return None
        num_tokens = (num_blocks - num_local_blocks) * self._block_size
        ready_at = max(now, self._free_at) + num_tokens * self._seconds_per_token
        position = num_local_blocks * self._block_size
        if ready_at - now >= prefill_seconds(self._profile, position, num_tokens) * self._slowness:
            return None
        self._free_at = ready_at
        return num_blocks, ready_at
