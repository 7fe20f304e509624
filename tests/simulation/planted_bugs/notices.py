"""Planted bugs in the handling of shards that have notice that they end."""

from __future__ import annotations

from router.core import core
from router.core.admission.outage import Outage
from router.core.dispatch.refusals import shard_lost
from tests.simulation.planted_bugs.registry import Patch, caught_by
from tools.dst.checkers import SchedulingEndsNothing


@caught_by(SchedulingEndsNothing, first_seed=60)
def takes_the_end_of_a_shard_with_notice_for_a_failure(patch: Patch) -> None:
    """The end of its shard costs a request an attempt, although it was announced."""
    patch.setattr(core, "shard_departed", shard_lost)


@caught_by(SchedulingEndsNothing)
def has_no_patience_after_a_notice(patch: Patch) -> None:
    """What the last shard of its model had to leave is given up like after an outage."""
    patch.setattr(Outage, "_is_kept", lambda _self, _live: False)
