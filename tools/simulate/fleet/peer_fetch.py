"""Models a shard that fetches KV blocks from another shard instead of computing them.

A shard receives one transfer at a time at the full bandwidth of its link. The sending shard is not slowed down.
"""

from __future__ import annotations

from collections.abc import Sequence

from tools.simulate.fleet.kv_cache import ModelledKvCache
from tools.simulate.fleet.profile import Profile
from tools.simulate.fleet.sequence import ShardSequence
from tools.simulate.fleet.step_time import prefill_seconds


class PeerLink:
    """The link of one shard to the caches of the others."""

    def __init__(
        self,
        profile: Profile,
        block_size: int,
        bytes_per_second: float,
        slowness: float,
        peers: Sequence[ModelledKvCache],
    ) -> None:
        self._profile = profile
        self._block_size = block_size
        self._seconds_per_token = profile.kv_bytes_per_token / bytes_per_second
        self._slowness = slowness
        self._peers = peers
        self._free_at = 0.0

    def fetch(self, sequence: ShardSequence, num_local_blocks: int, now: float) -> tuple[int, float] | None:
        """Begin a transfer if a peer holds more of the prompt's prefix and a transfer is faster than computing it.
        Returns how many leading blocks will be present and when, or None if the shard must compute them."""
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
