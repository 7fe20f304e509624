"""Planted bugs in the sharing of shards between tenants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lab.dst.checkers import NoIdleWait, PreemptionsJustified, ReserveKept
from router.core.dispatch.fair_shares import FairShares, Preemption
from tests.lab.dst.planted_bugs.registry import Patch, caught_by


@caught_by(PreemptionsJustified)
def leaves_a_large_tenant_nothing(patch: Patch) -> None:
    """A tenant loses all its sequences on a shard to one that needs a single place."""
    original = FairShares._for

    def all_of_them(self: FairShares, *args: Any) -> Preemption | None:
        found = original(self, *args)
        if found is None:
            return None
        choices = [c for c in found.shard.choices.values() if c.request.request.tenant == found.tenant]
        return found._replace(choices=choices)

    patch.setattr(FairShares, "_for", all_of_them)


@caught_by(PreemptionsJustified)
def preempts_for_requests_that_have_not_waited(patch: Patch) -> None:
    """A request that has only just arrived takes another tenant's place."""
    original = FairShares._starved

    def starved(self: FairShares, queues: Any, before: float, crowded: Any) -> Iterator[Any]:
        return original(self, queues, before + 1e9, crowded)

    patch.setattr(FairShares, "_starved", starved)


@caught_by(ReserveKept, first_seed=240)
def ignores_the_reserve_of_blocks(patch: Patch) -> None:
    """A tenant that holds most blocks is sent more sequences as long as places are free."""
    patch.setattr(FairShares, "_must_leave_blocks", lambda *_: False)


@caught_by(PreemptionsJustified)
def preempts_while_enough_blocks_are_free(patch: Patch) -> None:
    """Sequences leave although the reserve is free."""
    original = FairShares._for_blocks

    def for_blocks(self: FairShares, shard: Any, before: float) -> Preemption | None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(self._blocks, "num_free", lambda _: 0)
            return original(self, shard, before)

    patch.setattr(FairShares, "_for_blocks", for_blocks)


@caught_by(NoIdleWait)
def defers_a_tenant_when_no_prefill_is_left(patch: Patch) -> None:
    """A tenant above its share waits for prefill to end where none is unfinished."""
    patch.setattr(
        FairShares,
        "must_defer",
        lambda self, shard, tenant: self.max_prefill_tokens(shard, tenant) is not None,
    )
