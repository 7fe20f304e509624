"""Limits at admission: requests are admitted, refused, or held for a moment until a lease of their limits has arrived.

A held request is live: it can be cancelled, its client can leave and its time can run out, and it ends once like any
other. Nothing else has been done for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core import events as ev
from router.core.action_buffer import ActionBuffer
from router.core.actions import LeasesWanted, LimitsCounted
from router.core.dispatch.overload import retry_after_seconds
from router.core.fleet.fleet import Fleet
from router.core.live import LiveRequest
from router.core.relay.lifecycle import Lifecycle
from router.core.tenancy.limiter import Limiter

MAX_HELD: Final = 4096
"""The most requests that may be held."""


class RequestsAwaitingLease:
    def __init__(self, limiter: Limiter, fleet: Fleet, lifecycle: Lifecycle, action_buffer: ActionBuffer) -> None:
        self._limiter = limiter
        self._fleet = fleet
        self._lifecycle = lifecycle
        self._action_buffer = action_buffer
        self._held: dict[str, LiveRequest] = {}
        """In the order of their arrival. Requests that ended meanwhile are removed at the next look."""
        self.resume: Callable[[LiveRequest, KvloomError | None, float], None] = lambda _live, _error, _now: None
        """Continues a request once it is no longer held; with an error it is refused. Set by Arrivals."""

    def admit(self, live: LiveRequest, now: float) -> KvloomError | None:
        """Charge the request to its limits, or hold it (`live.is_held`), or refuse it."""
        request = live.request
        charge = self._limiter.charge_for(request, self._fleet.largest_window, now)
        if charge is None or isinstance(charge, KvloomError):
            return charge
        error = self._limiter.admit(charge, now)
        if error is not None:
            return error
        if charge.is_held and len(self._held) >= MAX_HELD:
            charge.stop_waiting()
            return _too_many(request.request_id)
        live.charge = charge
        if live.is_held:
            self._held[request.request_id] = live
        return None

    def release(self, live: LiveRequest) -> None:
        """The request was refused after all: it burns nothing."""
        if live.charge is not None:
            self._limiter.settle(live.charge, 0, 0, 0, was_dispatched=False, has_answer=False, failed=True)

    def on_side_call(self, event: ev.SideCallArrived, now: float) -> None:
        decided = self._limiter.side_calls.arrive(event, now)
        if decided is not None:
            self._action_buffer.add(decided)

    def on_side_call_settled(self, event: ev.SideCallSettled, now: float) -> None:
        self._limiter.side_calls.settle(event, now)

    def on_leases(self, event: ev.LeasesGranted, now: float) -> None:
        self._limiter.on_leases(event, now)
        for decided in self._limiter.side_calls.on_leases(self._limiter.num_routers, now):
            self._action_buffer.add(decided)
        for live in list(self._held.values()):
            self._try_again(live, now, is_last_try=False)

    def conclude(self, now: float) -> None:
        """Ask for the leases that are needed after this event; called at the end of each."""
        while self._held:
            live = next(iter(self._held.values()))
            charge = live.charge
            if charge is not None and live.num_open_choices and now < charge.held_until:
                break
            self._try_again(live, now, is_last_try=True)
        for decided in self._limiter.side_calls.conclude(self._limiter.num_routers, now):
            self._action_buffer.add(decided)
        if not self._limiter.has_pending_actions(now):
            return
        wants = self._limiter.take_wants(now)
        if wants:
            self._action_buffer.add(LeasesWanted(wants))
        counts = self._limiter.take_counts()
        if counts:
            self._action_buffer.add(LimitsCounted(counts))

    def next_deadline(self) -> float:
        """The time at which `conclude` has to be called; infinity: not in the present state."""
        at = min(self._limiter.next_deadline(), self._limiter.side_calls.next_deadline())
        if not self._held:
            return at
        first = next(iter(self._held.values()))
        held_until = math.inf if first.charge is None else first.charge.held_until
        return min(held_until, at)

    def check_integrity(self) -> None:
        live = self._lifecycle.requests.values()
        held = {request.request.request_id for request in live if request.is_held}
        assert held <= self._held.keys()
        self._limiter.check_integrity(request.charge for request in live if request.charge is not None)

    def _try_again(self, live: LiveRequest, now: float, *, is_last_try: bool) -> None:
        name = live.request.request_id
        charge = live.charge
        if charge is None or not live.num_open_choices:
            del self._held[name]
            return
        error = self._limiter.admit(charge, now, is_last_try=is_last_try)
        if error is not None or charge.is_admitted:
            del self._held[name]
            self.resume(live, error, now)


def _too_many(request_id: str) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_OVERLOADED,
        "Too many requests wait for their limits to be looked up.",
        retry_after_seconds=retry_after_seconds(request_id),
    )
