"""Guaranteed shares of cached blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lab.dst.checker import Checker
from lab.dst.nodes.block_cache import prompt_hashes
from lab.dst.views import ShardView, SimulatedRouterView
from router.core.events import Event, KvChange, Request, RequestArrived


class KvSharesKept(Checker):
    """Whatever others store, a tenant with a share still has what it had, or at least its share."""

    invariant = "kv_shares_kept"

    def __init__(self) -> None:
        self._percents: dict[str, int] = {}
        """By salt, which stands for the tenant: as clients' requests say, whatever routers make of it."""
        self._salts: dict[int, str] = {}
        """By block."""

    def before_event(self, node: SimulatedRouterView, event: Event) -> None:  # noqa: ARG002
        if isinstance(event, RequestArrived) and event.request.kv_share is not None:
            self._percents[event.request.cache_salt] = event.request.kv_share.percent

    def on_stored(self, shard: ShardView, request: Request, changes: Sequence[KvChange]) -> None:
        salt = request.cache_salt
        for block_hash in prompt_hashes(request, shard.shape.block_size):
            self._salts[block_hash] = salt
        removed = Counter(self._salts.get(block, "") for change in changes for block in change.removed)
        for tenant in removed.keys() & self._percents.keys() - {salt}:
            num_left = sum(self._salts.get(block) == tenant for block in shard.cache.blocks)
            num_guaranteed = shard.shape.num_blocks * self._percents[tenant] // 100
            if num_left < min(num_guaranteed, num_left + removed[tenant]):
                self.fail(
                    f"{shard.shard_id} evicted {removed[tenant]} blocks of {tenant} for {request.request_id}: "
                    f"{num_left} are left, and {num_guaranteed} guaranteed"
                )
