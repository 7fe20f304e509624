"""Planted bugs in guaranteed shares of KV blocks."""

from __future__ import annotations

from typing import Any

import msgspec

from lab.dst.checkers import KvSharesKept
from router.core.dispatch.attempt_sender import AttemptSender
from router.core.live import LiveRequest
from shard_server.engines.eviction_order import EvictionOrder, KvOwner
from tests.lab.dst.planted_bugs.registry import Patch, caught_by


@caught_by(KvSharesKept, first_seed=50)
def evicts_the_oldest_block_whoever_owns_it(patch: Patch) -> None:
    """The least recently used block of all is evicted first, whatever share protects it."""

    def first(self: EvictionOrder) -> KvOwner | None:
        owners = [owner for owner in (self.common, *self.owners) if owner.unused]
        return min(owners, key=lambda owner: next(iter(owner.unused.values())), default=None)

    patch.setattr(EvictionOrder, "_first_unprotected", first)


@caught_by(KvSharesKept, first_seed=70)
def forgets_shares_in_prefill_chunks(patch: Patch) -> None:
    """The first part of a long prompt is computed for an owner without a share, and its blocks go with the next
    flood."""
    original = AttemptSender.send_prefill_chunk

    def send_prefill_chunk(self: AttemptSender, live: LiveRequest, *args: Any) -> None:
        request = live.request
        live.request = msgspec.structs.replace(request, kv_share=None)
        try:
            original(self, live, *args)
        finally:
            live.request = request

    patch.setattr(AttemptSender, "send_prefill_chunk", send_prefill_chunk)
