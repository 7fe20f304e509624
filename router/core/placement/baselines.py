"""Simple policies that say what looking at one thing only achieves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import xxhash

from router.core.placement.policy import Arrival, Candidate, Policy


class RoundRobin(Policy):
    """The shard whose turn is longest ago."""

    terms: ClassVar = ("turn",)

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        return [(float(c.turn),) for c in candidates]


class LeastRequests(Policy):
    """The shard with the fewest sequences."""

    terms: ClassVar = ("running", "waiting")

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        return [(float(c.num_running), float(c.num_waiting)) for c in candidates]


class LeastPrefill(Policy):
    """The shard that has the least prefill queued, wherever the prefix lies."""

    terms: ClassVar = ("queued_prefill",)

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        return [(c.queue_seconds,) for c in candidates]


class SessionHash(Policy):
    """Rendezvous hashing (Thaler and Ravishankar, 1998) of the session: a session stays where it is, whatever the load.

    Requests without a session key go by their first block.
    """

    terms: ClassVar = ("rank",)

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        key = arrival.session_key or (str(arrival.block_hashes[0]) if arrival.block_hashes else arrival.request_id)
        return [(xxhash.xxh3_64_intdigest(f"{key}\0{c.shard_id}".encode()) / 2**64,) for c in candidates]
