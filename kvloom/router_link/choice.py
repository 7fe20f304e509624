"""Chooses the router that gets a request, by a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

SPREAD: Final = 1.25
"""A router with more than this many times its fair share of requests in flight gets none for the sake of affinity."""
SLACK_REQUESTS: Final = 8
"""How many requests it may have beyond that, so that a small number of requests stays together."""
MAX_SILENT_SECONDS: Final = 1.5
"""A router that has owed a response for longer may hang: it gets no new requests while another one is healthy. If it
only computes a long prompt, little is lost."""


class RouterView(NamedTuple):
    """A router that is connected and not draining."""

    address: str
    salt: int
    """The hash of the address (`salt_of`)."""
    is_ready: bool
    """True when the router knows a ready shard for the request's model."""
    num_in_flight: int
    """How many of this process's requests it has."""
    silent_seconds: float = 0.0
    """The time since its last frame, or since it got a request to answer if that is later; 0 while it has none."""


def salt_of(address: str) -> int:
    """The hash of a router's address, as pick_router uses it."""
    return xxhash.xxh3_64_intdigest(address.encode())


def pick_router(routers: Sequence[RouterView], affinity_key: bytes) -> RouterView | None:
    """The router for a request; None when `routers` is empty.

    Requests of one key go to one router, so that it knows what it has just placed, and each tenant waits in one queue.
    When a router is added or removed, only its keys move: rendezvous hashing (Thaler & Ravishankar, 1998) with bounded
    loads (Mirrokni et al., 2018). Without a key (b""), the router with the fewest requests in flight is picked.
    """
    ready = [router for router in routers if router.is_ready] or routers
    candidates = [router for router in ready if router.silent_seconds <= MAX_SILENT_SECONDS] or ready
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    if not affinity_key:
        return min(candidates, key=lambda router: router.num_in_flight)
    fair_share = sum(router.num_in_flight for router in candidates) / len(candidates)
    limit = SPREAD * fair_share + SLACK_REQUESTS
    return max(
        (router for router in candidates if router.num_in_flight <= limit),
        key=lambda router: xxhash.xxh3_64_intdigest(affinity_key, seed=router.salt),
    )
