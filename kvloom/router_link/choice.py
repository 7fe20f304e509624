"""Which of several routers takes a request: a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

SPREAD: Final = 1.25
"""A router that has more than this times its fair share under way takes no request for the sake of affinity."""
SLACK_REQUESTS: Final = 8
"""What it may have under way beyond that, so that few requests stay together."""
MAX_SILENT_SECONDS: Final = 1.5
"""A router that owes news for longer may hang: it gets nothing new while another one is well. If it only computes a
long prompt, little is lost."""


class RouterView(NamedTuple):
    """A router that is connected and not draining."""

    address: str
    salt: int
    """Of the address (`salt_of`)."""
    is_ready: bool
    """It knows a ready shard for the request's model."""
    num_in_flight: int
    """Requests of this process that it has."""
    silent_seconds: float = 0.0
    """Since it was last heard of, or has had something to answer; 0 while it has nothing."""


def salt_of(address: str) -> int:
    return xxhash.xxh3_64_intdigest(address.encode())


def pick_router(routers: Sequence[RouterView], affinity_key: bytes) -> RouterView | None:
    """None when there is none.

    Requests of one key go to one router, so that what it has just placed is known to it and tenants wait in one line;
    when a router comes or goes only its keys move (rendezvous hashing, with bounded loads). Without a key (b""): the
    one with the least under way."""
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
