"""Nothing lives beyond its time."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from router.core.actions import Action, SubmitAttempt
from router.core.events import Event, RequestArrived, Tick
from tools.dst.checkers.base import Checker

if TYPE_CHECKING:
    from tools.dst.nodes.router_node import RouterNode
    from tools.dst.witness.seen import SeenRequest


class DeadlinesKept(Checker):
    """A tick leaves nothing behind that is due, and the next one is asked for in time. Who has no time left is sent to
    no shard."""

    invariant = "deadlines_kept"

    def on_dispatch(self, node: RouterNode, seen: SeenRequest | None, attempt: SubmitAttempt) -> None:
        if seen is None:
            return
        deadline = seen.deadline if seen.was_dispatched else min(seen.deadline, seen.queue_deadline)
        if seen is not node.witness.arriving and node.now >= deadline:
            self.fail(f"{seen.request.request_id} was dispatched at {node.now:.3f}, its deadline was {deadline:.3f}")

    def on_prefill_chunk(self, node: RouterNode, seen: SeenRequest | None, prefill_chunk: SubmitAttempt) -> None:
        self.on_dispatch(node, seen, prefill_chunk)

    def after_event(self, node: RouterNode, event: Event, actions: Sequence[Action]) -> None:
        if not isinstance(event, Tick | RequestArrived):
            return
        now, earliest = node.now, float("inf")
        for seen in node.witness.live.values():
            deadline = seen.deadline
            if seen.is_waiting and not seen.was_dispatched:
                deadline = min(deadline, seen.queue_deadline)
            earliest = min(earliest, deadline)
            if isinstance(event, Tick) and deadline <= now:
                self.fail(f"{seen.request.request_id} lives at {now:.3f}, its deadline was {deadline:.3f}")
        next_tick = node.core.next_deadline()
        if node.witness.live and (next_tick is None or next_tick > earliest):
            self.fail(f"the next tick is asked for at {next_tick}, a deadline is at {earliest:.3f}")
