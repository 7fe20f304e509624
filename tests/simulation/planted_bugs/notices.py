"""Planted bugs in the handling of shards that have notice that they end."""

from __future__ import annotations

import math

from router.core import core
from router.core.admission.outage import Outage
from router.core.dispatch.refusals import shard_lost
from router.core.health.departing_shards import DepartingShards
from tests.simulation.planted_bugs.registry import Patch, caught_by
from tools.dst.checkers import NoticedShardsEmpty, SchedulingEndsNothing


@caught_by(NoticedShardsEmpty)
def gives_no_notice_to_what_runs(patch: Patch) -> None:
    """A shard with notice gets nothing new, but what runs there stays."""
    patch.setattr(DepartingShards, "next_deadline", lambda _self: math.inf)
    patch.setattr(DepartingShards, "_move_due", lambda *_: None)


@caught_by(SchedulingEndsNothing)
def takes_the_end_of_a_shard_with_notice_for_a_failure(patch: Patch) -> None:
    """The end of its shard costs a request an attempt, although it was announced."""
    patch.setattr(core, "shard_departed", shard_lost)


@caught_by(SchedulingEndsNothing)
def has_no_patience_after_a_notice(patch: Patch) -> None:
    """What the last shard of its model had to leave is given up like after an outage."""
    patch.setattr(Outage, "_is_kept", lambda _self, _live: False)
