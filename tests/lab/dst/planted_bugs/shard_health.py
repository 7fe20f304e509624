"""Planted bugs in the handling of shards that hang or are slow."""

from __future__ import annotations

from typing import Any

import pytest

from lab.dst.checkers import HungShardsAbandoned, PlacementsFit, SuspicionBounded
from router.core.fleet.fleet import Shard
from router.core.fleet.shard_health import ShardHealth
from router.core.health.health_watch import HealthWatch
from router.core.health.migrator import Migrator
from router.core.placement.eligibility import Eligibility
from tests.lab.dst.planted_bugs.registry import Patch, caught_by


@caught_by(HungShardsAbandoned, first_seed=40)
def takes_reports_for_progress(patch: Patch) -> None:
    """A load report counts as progress, as the answer to a ping would: a shard whose engine hangs is never
    suspected."""
    original = ShardHealth.note_load

    def note_load(self: ShardHealth, *args: Any) -> None:
        original(self, *args)
        self.silent_seconds = 0.0

    patch.setattr(ShardHealth, "note_load", note_load)


@caught_by(HungShardsAbandoned, first_seed=300)
def leaves_work_on_suspected_shards(patch: Patch) -> None:
    """A suspected shard gets nothing new, but its running requests stay."""
    patch.setattr(Migrator, "move_off", lambda _self, _shard, _now: None)


@caught_by(SuspicionBounded)
def suspects_every_shard(patch: Patch) -> None:
    """The number of shards that are suspected already is not checked."""
    patch.setattr(HealthWatch, "_may_suspect", lambda _self, _shard: True)


@caught_by(PlacementsFit)
def trusts_suspected_shards(patch: Patch) -> None:
    """A suspected shard gets new work like any other."""
    original = Eligibility.eligible

    def eligible(self: Eligibility, live: Any) -> list[Shard]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Shard, "is_suspected", property(lambda _shard: False))
            self._fleet.note_readiness()
            shards = original(self, live)
        self._fleet.note_readiness()
        return shards

    patch.setattr(Eligibility, "eligible", eligible)
