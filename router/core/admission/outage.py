"""Requests that no shard can run: they wait for a while for one to return, and are then refused. Those whose shard was
stopped on purpose wait as long as they may take, since scheduling ends no answer. New ones for a model without shards
may wait for its first one to start."""

from __future__ import annotations

from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.admission.deadlines import Deadlines
from router.core.dispatch.dispatch_queue import DispatchQueue
from router.core.fleet.fleet import Fleet
from router.core.live import LiveRequest
from router.core.relay.lifecycle import Lifecycle
from router.core.rule_settings import OverloadSettings


class Outage:
    """Decides how long unschedulable requests wait, and fails them afterwards."""

    def __init__(
        self, fleet: Fleet, queue: DispatchQueue, lifecycle: Lifecycle, deadlines: Deadlines, config: OverloadSettings
    ) -> None:
        self._fleet = fleet
        self._queue = queue
        self._lifecycle = lifecycle
        self._deadlines = deadlines
        self._patience_seconds = config.outage_patience_seconds
        self._start_patience_seconds = max(config.start_patience_seconds, config.outage_patience_seconds)
        self.admits = config.start_patience_seconds > 0
        """True when new requests wait for the first shard of their model."""
        self.overdue: list[LiveRequest] = []
        """Requests with a deadline that has passed, perhaps that of their patience."""

    def begin(self, live: LiveRequest, now: float) -> None:
        """A new request waits for the first shard of its model. Its turn in the queue is counted from then on."""
        live.queue_deadline = min(live.deadline, live.queue_deadline + self._start_patience_seconds)
        live.unschedulable_at = now + self._start_patience_seconds
        self._deadlines.add(live.unschedulable_at, live)

    def find_unschedulable(self, now: float) -> None:
        """Find the requests that no shard can run, after the fleet may have changed."""
        self._queue.check_unschedulable = False
        unschedulable = self._queue.unschedulable()
        names = {live.request.request_id for live in unschedulable}
        for live in self._queue.queues:
            if live.request.request_id not in names:
                live.unschedulable_at = None
        for live in unschedulable:
            is_kept = self._is_kept(live)
            patience_seconds = self._patience_seconds if live.num_attempts else self._start_patience_seconds
            until = live.deadline if is_kept else now + patience_seconds
            before = live.unschedulable_at
            if until <= now:
                self._lifecycle.give_up(live, now)
            elif before is None or until < before or (is_kept and until > before):
                live.unschedulable_at = until
                self._deadlines.add(until, live)

    def _is_kept(self, live: LiveRequest) -> bool:
        """True when it waits until its own deadline: its shard was stopped on purpose, a shard may come for it, and no
        other model would continue it."""
        failure, request, fleet = live.failure, live.request, self._fleet
        if failure is None or failure.reason != ErrorReason.ERROR_REASON_DRAINING or request.has_fallback_model:
            return False
        is_served = fleet.knows(request.model) and not fleet.is_withdrawn(request.model)
        has_adapter = request.adapter is None or fleet.has_adapter(request.model, request.adapter)
        return is_served and has_adapter and not fleet.is_asleep(request.model)

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
