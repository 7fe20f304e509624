"""Planted bugs in the handling of deadlines and objectives."""

from __future__ import annotations

from typing import Any

import msgspec

from lab.dst.checkers import DeadlinesKept, EndsJustified
from router.core.live import Choice
from router.core.objectives import LiveObjectives, Objectives
from router.core.relay.lifecycle import Lifecycle
from tests.lab.dst.planted_bugs.registry import Patch, caught_by


@caught_by(DeadlinesKept)
def drops_the_deadline_upon_failover(patch: Patch) -> None:
    """An answer that continues on another shard has all the time that any request has."""
    original = Lifecycle.retry

    def retry(self: Lifecycle, choice: Choice, *args: Any, **options: Any) -> None:
        if choice.request.objectives is not None:
            choice.request.deadline = choice.request.arrived_at + 600.0
        original(self, choice, *args, **options)

    patch.setattr(Lifecycle, "retry", retry)


@caught_by(EndsJustified, first_seed=120)
def refuses_admitted_requests_as_impossible(patch: Patch) -> None:
    """A request that another router has admitted, and begun to answer, is refused because its TTFT cannot be met."""
    original = LiveObjectives.__init__

    def init(self: LiveObjectives, wanted: Objectives, now: float, **_: Any) -> None:
        original(self, msgspec.structs.replace(wanted, is_admitted=False), now, is_continued=False)

    patch.setattr(LiveObjectives, "__init__", init)
