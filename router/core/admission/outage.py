"""Requests that no shard can run: they wait for a while for one to return, and are then refused."""

from __future__ import annotations

from router.core.admission.deadlines import Deadlines
from router.core.dispatch.dispatch_queue import DispatchQueue
from router.core.live import LiveRequest
from router.core.relay.lifecycle import Lifecycle


class Outage:
    """Decides how long unschedulable requests wait, and fails them afterwards."""

    def __init__(
        self, queue: DispatchQueue, lifecycle: Lifecycle, deadlines: Deadlines, patience_seconds: float
    ) -> None:
        self._queue = queue
        self._lifecycle = lifecycle
        self._deadlines = deadlines
        self._patience_seconds = patience_seconds
        self.overdue: list[LiveRequest] = []
        """Requests with a deadline that has passed, perhaps that of their patience."""

    def find_unschedulable(self, now: float) -> None:
        """Find the requests that no shard can run, after the fleet may have changed."""
        self._queue.check_unschedulable = False
        unschedulable = self._queue.unschedulable()
        if not self._patience_seconds:
            for live in unschedulable:
                self._lifecycle.give_up(live, now)
            return
        names = {live.request.request_id for live in unschedulable}
        for live in self._queue.queues:
            if live.request.request_id not in names:
                live.unschedulable_at = None
        for live in unschedulable:
            if live.unschedulable_at is None:
                live.unschedulable_at = now + self._patience_seconds
                self._deadlines.add(live.unschedulable_at, live)

    def expire(self, now: float) -> bool:
        """Called after the event that found them overdue, which may have brought a shard for them. Returns whether a
        request was ended."""
        if not self.overdue:
            return False
        overdue, self.overdue = self.overdue, []
        gave_up = False
        for live in overdue:
            if live.is_queued and live.unschedulable_at is not None and now >= live.unschedulable_at:
                self._lifecycle.give_up(live, now)
                gave_up = True
        return gave_up
