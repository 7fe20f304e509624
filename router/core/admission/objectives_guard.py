"""Refuses requests whose caller would get nothing in time, when that costs nothing: on arrival
(docs/how-to/deadlines.md)."""

from __future__ import annotations

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.dispatch.dispatch_queue import DispatchQueue
from router.core.dispatch.overload import OverloadGuard, retry_after_seconds
from router.core.dispatch.refusals import deadline_exceeded
from router.core.live import LiveRequest
from router.core.objectives import Cause, LiveObjectives
from router.core.placement.placer import Placer


class ObjectivesGuard:
    """Pure, like all of the core. It is asked only about requests that have objectives."""

    def __init__(self, placer: Placer, queue: DispatchQueue, overload: OverloadGuard) -> None:
        self._placer = placer
        self._queue = queue
        self._overload = overload

    def refusal(self, live: LiveRequest, objectives: LiveObjectives, now: float) -> KvloomError | None:
        """The reason why the request would be late; None when it would not, or when that is not known. Notes the
        prediction."""
        if objectives.deadline <= now:
            return deadline_exceeded(live)
        due = min(objectives.ttft_due, objectives.deadline)
        least = self._placer.least_ttft(
            live, lambda candidate: self._queue.held_ahead_seconds(live, candidate, objectives.ttft_due), now
        )
        if least is None:
            return None
        seconds = least.seconds
        if not least.has_room and self._queue.queues.num_waiting(live.request.model):
            seconds += self._overload.wait_seconds(live.request, now) or 0.0
        objectives.predicted_ttft_seconds = now + seconds - objectives.arrived_at
        if now + seconds <= due or not objectives.is_refusable:
            return None
        name = "its deadline" if objectives.deadline <= objectives.ttft_due else "the time to first token it asks for"
        if now + least.idle_seconds > due:
            objectives.refused = Cause.SPEED
            return KvloomError(
                ErrorReason.ERROR_REASON_DEADLINE_IMPOSSIBLE,
                f"Even an idle shard would need about {least.idle_seconds:.3g} seconds for the first token of this "
                f"request, which is later than {name}.",
            )
        objectives.refused = Cause.LOAD
        return KvloomError(
            ErrorReason.ERROR_REASON_QUEUE_FULL,
            f"The first token of this request would take about {seconds:.3g} seconds now, which is later than {name}; "
            "try again later.",
            retry_after_seconds=retry_after_seconds(live.request.request_id, seconds),
        )
