"""Deadlines and the timer that enforces them."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence

from lab.dst.checker import Checker
from lab.dst.observed import ObservedRequest
from lab.dst.views import SimulatedRouterView
from router.core.actions import Action, SubmitAttempt
from router.core.events import Event, RequestArrived, Tick


class DeadlinesKept(Checker):
    """After a tick no overdue request is left, and the next tick is requested in time. An overdue request is not
    dispatched."""

    invariant = "deadlines_kept"

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if observed is None:
            return
        deadline = observed.deadline if observed.was_dispatched else min(observed.deadline, observed.queue_deadline)
        if observed is not node.witness.arriving and node.now >= deadline:
            self.fail(
                f"{observed.request.request_id} was dispatched at {node.now:.3f}, its deadline was {deadline:.3f}"
            )

    def on_prefill_chunk(
        self, node: SimulatedRouterView, observed: ObservedRequest | None, prefill_chunk: SubmitAttempt
    ) -> None:
        self.on_dispatch(node, observed, prefill_chunk)

    def on_prefill_leg(self, node: SimulatedRouterView, observed: ObservedRequest | None, leg: SubmitAttempt) -> None:
        self.on_dispatch(node, observed, leg)

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        if not isinstance(event, Tick | RequestArrived):
            return
        now, earliest = node.now, float("inf")
        for observed in node.witness.live.values():
            deadline = observed.deadline
            if observed.is_waiting and not observed.was_dispatched:
                deadline = min(deadline, observed.queue_deadline)
            earliest = min(earliest, deadline)
            if isinstance(event, Tick) and deadline <= now:
                self.fail(f"{observed.request.request_id} is still live at {now:.3f}, its deadline was {deadline:.3f}")
        next_tick = node.core.next_deadline()
        if node.witness.live and (next_tick is None or next_tick > earliest):
            self.fail(f"the next tick is asked for at {next_tick}, a deadline is at {earliest:.3f}")
