"""Simple policies, each of which looks at one thing only: baselines for comparison."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from router.core.placement.policy import Arrival, Candidate, Policy


class RoundRobin(Policy):
    """Picks the shard whose turn is longest ago."""

    terms = ("turn",)

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        return [(float(c.turn),) for c in candidates]


class LeastRequests(Policy):
    """Picks the shard with the fewest sequences. Of another tenant's, no more count than the request's own tenant has
    there: each tenant's requests are spread by themselves."""

    terms = ("running", "waiting")

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        return [(float(c.num_running - c.num_beyond_parts), float(c.num_waiting)) for c in candidates]


class LeastPrefill(Policy):
    """Picks the shard with the least queued prefill, wherever the prefix lies."""

    terms = ("queued_prefill",)

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        return [(c.queue_seconds,) for c in candidates]


class SessionHash(Policy):
    """Rendezvous hashing (Thaler and Ravishankar, 1998) of the session: a session stays on its shard, whatever the
    load.

    Requests without a session key are hashed by their first block.
    """

    terms = ("rank",)

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        key = arrival.session_key or (str(arrival.block_hashes[0]) if arrival.block_hashes else arrival.request_id)
        return [(xxhash.xxh3_64_intdigest(f"{key}\0{c.shard_id}".encode()) / 2**64,) for c in candidates]
