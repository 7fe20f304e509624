"""Planted bugs in the scheduling of declared classes."""

from __future__ import annotations

from typing import Any

from lab.dst.checkers import ClassesAge, FloorsKept, SchedulingEndsNothing
from router.core.core import RouterCore
from router.core.dispatch.class_shares import ClassShares
from router.core.dispatch.refusals import queue_timeout
from router.core.live import LiveRequest
from tests.lab.dst.planted_bugs.registry import Patch, caught_by


@caught_by(ClassesAge, first_seed=1350)
def forgets_how_long_requests_wait(patch: Patch) -> None:
    """Waiting makes no request more urgent."""
    patch.setattr(LiveRequest, "rank", lambda self, _now: self.priority_class.rank)


@caught_by(FloorsKept)
def sends_others_into_the_floor(patch: Patch) -> None:
    """What is reserved for a class is taken by others."""
    patch.setattr(ClassShares, "must_leave_room", lambda *_: False)


@caught_by(SchedulingEndsNothing)
def gives_up_answers_that_wait_again(patch: Patch) -> None:
    """The limit of waiting holds for answers that had to leave their shard, too."""
    original = RouterCore._expiry

    def expiry(self: RouterCore, live: LiveRequest, now: float) -> Any:
        if live.is_queued and now >= live.queue_deadline:
            return queue_timeout(live.request.request_id, now - live.arrived_at)
        return original(self, live, now)

    patch.setattr(RouterCore, "_expiry", expiry)
