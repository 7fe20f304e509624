"""Planted bugs in the handling of shards that have notice that they end."""

from __future__ import annotations

import math
from typing import Any

from lab.dst.checkers import DrainedShardsEmpty, SchedulingEndsNothing
from router.core import core
from router.core.admission.outage import Outage
from router.core.dispatch.refusals import shard_lost
from router.core.fleet.departure import Departure
from router.core.health.departing_shards import DepartingShards
from tests.lab.dst.planted_bugs.registry import Patch, caught_by


@caught_by(SchedulingEndsNothing, first_seed=60)
def takes_the_end_of_a_shard_with_notice_for_a_failure(patch: Patch) -> None:
    """The end of its shard costs a request an attempt, although it was announced."""
    patch.setattr(core, "shard_departed", shard_lost)


@caught_by(SchedulingEndsNothing)
def has_no_patience_after_a_notice(patch: Patch) -> None:
    """What the last shard of its model had to leave is given up like after an outage."""
    patch.setattr(Outage, "_is_kept", lambda _self, _live: False)


@caught_by(DrainedShardsEmpty, max_seeds=20, first_seed=920)
def forgets_shards_that_have_notice(patch: Patch) -> None:
    """The notice is noted, nothing new goes to the shard, and what runs there is left."""

    def move_due(_self: DepartingShards, _shard: Any, departure: Departure, _now: float) -> None:
        departure.next_move_at = math.inf

    patch.setattr(DepartingShards, "_move_due", move_due)
