"""The driver owns the router core: it feeds the core the events of all links and carries out the core's actions.

Everything here runs on the event loop and nothing awaits, so an event and its consequences are one step: a frame of a
shard has reached the buffers of all its clients before anything else happens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec
import structlog

from kvloom.errors import KvloomError
from router.core.actions import (
    Action,
    AnswerCompleted,
    AnswerFlagged,
    AnswerResampled,
    BrownoutStepChanged,
    CancelOnShard,
    CheckPrompt,
    FleetChanged,
    LeasesWanted,
    LimitsCounted,
    PlacementDecided,
    PrefillLegCounted,
    RequestDegraded,
    RequestEnded,
    RequestsMoved,
    ScreenAnswers,
    SendStep,
    SequencesPreempted,
    ShardHealthChanged,
    SideCallDecided,
    SubmitAttempt,
    WantKvSnapshot,
)
from router.core.events import (
    JUDGE_CLIENT_ID,
    ClientGone,
    DrainEnded,
    Event,
    Request,
    RequestArrived,
    RequestCancelled,
    SlotsCancelled,
    Tick,
)
from router.core.frames import Step
from router.core.request_end import RequestEnd
from router.usage_records import Credit

log = structlog.get_logger()

MIN_TICK_SECONDS: Final = 0.001
"""Timers may fire a millisecond early; without a pause, ticks would then spin until the deadline has passed."""


class Core(Protocol):
    """The part of `router.core.core.RouterCore` that the driver and the links use."""

    def handle(self, event: Event, now: float) -> list[Action]: ...

    def has_request(self, request_id: str) -> bool: ...

    def next_deadline(self) -> float | None: ...

    @property
    def deadlines_stand(self) -> bool:
        """True when the last event left the next deadline unchanged."""
        ...

    @property
    def fleet(self) -> FleetChanged: ...


class ClientSink(Protocol):
    """Receives the steps of one client's requests and the state of the fleet. Its methods never block and never
    raise."""

    def send_step(self, step: Step) -> None: ...

    def send_fleet(self, fleet: FleetChanged) -> None: ...


class ShardSink(Protocol):
    """Receives the work for one shard. Its methods never block and never raise."""

    def submit(self, attempt: SubmitAttempt) -> None: ...

    def cancel(self, cancel: CancelOnShard) -> None: ...

    def want_kv_snapshot(self) -> None: ...


class SafetySink(Protocol):
    """Receives the text to be screened. Its methods never block and never raise."""

    def check_prompt(self, check: CheckPrompt) -> None: ...

    def screen_answers(self, answers: ScreenAnswers) -> None: ...


class LimitsSink(Protocol):
    """Asks for leases of limits, and counts what limits do. Its methods never block and never raise."""

    def leases_wanted(self, action: LeasesWanted) -> None: ...

    def limits_counted(self, action: LimitsCounted) -> None: ...


class SideCallSink(Protocol):
    """Is told which calls without an answer may go on. Its method never blocks and never raises."""

    def side_call_decided(self, action: SideCallDecided) -> None: ...


class Observer(Protocol):
    """Is called with everything that metrics, logs, health and the decision log record."""

    def placement_decided(self, decision: PlacementDecided) -> None:
        """Called for a sample of the requests, before `request_ended`. Requests may end without being placed."""
        ...

    def request_ended(self, ended: RequestEnded) -> None: ...

    def request_refused(self, error: KvloomError) -> None:
        """Called when a link has rejected an invalid request, which the core never received."""
        ...

    def tokens_credited(self, credit: Credit) -> None:
        """Called when a client has reported that metered tokens did not reach it."""
        ...

    def own_request_ended(self, ended: RequestEnded) -> None:
        """Called when a request of the router itself has ended, of which nothing else hears."""
        ...

    def answers_discarded(self, client_id: str, request_ids: Sequence[str]) -> None:
        """Called when answers have ended that the client has delivered to nobody (a cascade)."""
        ...

    def fleet_changed(self) -> None:
        """Called when shards, the safety service or draining changed, on which the router's health depends."""
        ...

    def shard_health_changed(self, change: ShardHealthChanged) -> None: ...

    def requests_moved(self, moved: RequestsMoved) -> None: ...

    def sequences_preempted(self, preempted: SequencesPreempted) -> None: ...

    def prefill_leg_counted(self, counted: PrefillLegCounted) -> None: ...

    def answer_resampled(self, change: AnswerResampled) -> None: ...

    def brownout_step_changed(self, change: BrownoutStepChanged) -> None: ...

    def request_degraded(self, degraded: RequestDegraded) -> None: ...


class AnswerObserver(Protocol):
    """Follows requests and their answers on their way through the driver, and may have requests of its own. Its methods
    never block and never raise."""

    def arrived(self, event: RequestArrived) -> Request:
        """Called with every request, on its way to the core. Returns what the core is to be given instead."""
        ...

    def stepped(self, client_id: str, step: Step) -> None:
        """Called with every step before its client gets it, and may change it."""
        ...

    def ended(self, ended: RequestEnded) -> bool:
        """Returns whether the request is the tap's own, which is only metered."""
        ...

    def is_own(self, request: Request) -> bool: ...


class AnswerSink(Protocol):
    """Knows some answers, and is told whole ones. Its methods never block and never raise."""

    def arrived(self, request: Request) -> RequestArrived | None:
        """Called with every request. Returns the event for the core; None: it is passed to `CoreDriver.pass_on`
        soon."""
        ...

    def release(self) -> None:
        """Pass on what is held back: something has happened that may concern it."""
        ...

    def completed(self, completed: AnswerCompleted) -> None:
        """Called before the client gets the end of the answer; may set a finish's receipt."""
        ...


class CoreDriver:
    """Feeds events to the core and carries out its actions.

    A sink is added before the event that announces its peer and removed before the event that reports the peer as gone.
    An action for a missing sink is therefore always about to be corrected by an event, and it is dropped.
    """

    def __init__(self, core: Core, observer: Observer) -> None:
        self.core = core
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._clients: dict[str, ClientSink] = {}
        self._shards: dict[str, ShardSink] = {}
        self._safety: SafetySink | None = None
        self._pending: deque[Event] = deque()
        self._dispatching = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._num_live_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        carry_out: dict[type, Callable[[Any], None]] = {
            SendStep: self._send_step,
            SubmitAttempt: self._submit,
            CancelOnShard: self._cancel,
            WantKvSnapshot: self._want_kv_snapshot,
            CheckPrompt: self._check_prompt,
            ScreenAnswers: self._screen_answers,
            RequestEnded: self._on_request_ended,
            FleetChanged: self._on_fleet_changed,
            PlacementDecided: observer.placement_decided,
            ShardHealthChanged: observer.shard_health_changed,
            RequestsMoved: observer.requests_moved,
            SequencesPreempted: observer.sequences_preempted,
            PrefillLegCounted: observer.prefill_leg_counted,
            AnswerResampled: observer.answer_resampled,
            BrownoutStepChanged: observer.brownout_step_changed,
            RequestDegraded: observer.request_degraded,
            AnswerCompleted: self._on_completed,
            AnswerFlagged: self._on_flagged,
        }
        self._carry_out = carry_out
        self._report_end = observer.request_ended
        self._taps: tuple[AnswerObserver, ...] = ()
        self._keeper: AnswerSink | None = None
        self.note_flagged: Callable[[AnswerFlagged], None] | None = None
        """Notes what flagged answers follow from. It never blocks and never raises."""
        self._fleet_hooks: list[Callable[[], None]] = [observer.fleet_changed]
        self._intercepted: frozenset[type] = frozenset({RequestArrived})
        """The events that do not go straight to the core."""

    def set_keeper(self, keeper: AnswerSink) -> None:
        """To be called before the first request. Without a keeper, a request costs one look whether there is one."""
        self._keeper = keeper
        self._intercepted |= {SlotsCancelled, RequestCancelled, ClientGone, DrainEnded}

    def add_tap(self, tap: AnswerObserver) -> None:
        """Without a tap, a request costs one look whether there is one, and a step nothing. Adding one again has no
        effect."""
        if tap not in self._taps:
            self._set_taps((*self._taps, tap))

    def remove_tap(self, tap: AnswerObserver) -> None:
        self._set_taps(tuple(one for one in self._taps if one is not tap))

    def _set_taps(self, taps: tuple[AnswerObserver, ...]) -> None:
        self._taps = taps
        is_off = not taps
        self._carry_out[SendStep] = self._send_step if is_off else self._send_tapped_step
        self._carry_out[PlacementDecided] = self._observer.placement_decided if is_off else self._on_tapped_placement
        self._report_end = self._observer.request_ended if is_off else self._report_tapped_end

    def on_fleet_change(self, hook: Callable[[], None]) -> None:
        """`hook` is called when shards, the safety service or draining changed, after the observer."""
        self._fleet_hooks.append(hook)

    def now(self) -> float:
        """Returns the time of the core's clock, in monotonic seconds."""
        return self._loop.time()

    def add_client(self, client_id: str, peer: ClientSink) -> None:
        """Raises ValueError when the id is taken."""
        if client_id in self._clients:
            raise ValueError(f"client id {client_id} is in use")
        self._clients[client_id] = peer

    def remove_client(self, client_id: str) -> None:
        self._clients.pop(client_id, None)

    def add_shard(self, shard_id: str, peer: ShardSink) -> None:
        self._shards[shard_id] = peer

    def remove_shard(self, shard_id: str) -> None:
        self._shards.pop(shard_id, None)

    def set_safety(self, peer: SafetySink | None) -> None:
        self._safety = peer
        self._call_fleet_hooks()

    def set_limits(self, desk: LimitsSink) -> None:
        """Without it, the core must have no limiter."""
        self._carry_out[LeasesWanted] = desk.leases_wanted
        self._carry_out[LimitsCounted] = desk.limits_counted

    def set_side_calls(self, desk: SideCallSink) -> None:
        """Without it, no SideCallArrived may be dispatched."""
        self._carry_out[SideCallDecided] = desk.side_call_decided

    @property
    def has_safety(self) -> bool:
        return self._safety is not None

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def dispatch(self, event: Event) -> None:
        """Handles an event and everything that follows from it.

        A nested call (a sink that reacts to an action) is queued behind the current event. Raises what the core raised:
        the caller owns the peer that the event came from, and ends that peer's connection.
        """
        if type(event) in self._intercepted:
            if type(event) is RequestArrived:
                self._num_live_requests += 1
                self._idle.clear()
                if self._keeper is not None:
                    passed = self._keeper.arrived(event.request)
                    if passed is None:
                        return
                    event = passed
                if self._taps:
                    event = self._tapped(event)
            elif self._keeper is not None:
                self._keeper.release()
        if self._dispatching:
            self._pending.append(event)
            return
        self._dispatching = True
        carry_out, pending = self._carry_out, self._pending
        next_event: Event | None = event
        deadlines_stand = True
        fault: Exception | None = None
        try:
            while next_event is not None:
                try:
                    for action in self.core.handle(next_event, self._loop.time()):
                        carry_out[type(action)](action)
                except Exception as error:  # Queued events belong to other peers, so they are handled first.
                    fault = fault or error
                if not self.core.deadlines_stand:
                    deadlines_stand = False
                next_event = pending.popleft() if pending else None
        finally:
            self._dispatching = False
            if not deadlines_stand:
                self._arm_timer()
        if fault is not None:
            raise fault

    def pass_on(self, event: RequestArrived) -> None:
        """Handle a request that the keeper has held. Raises as `dispatch` does."""
        self._pending.append(self._tapped(event))
        if not self._dispatching:
            self.dispatch(Tick())  # and then what is pending

    def _tapped(self, event: RequestArrived) -> RequestArrived:
        """The keeper has seen the client's own request: what a tap asks for besides changes no key of an answer."""
        for tap in self._taps:
            request = tap.arrived(event)
            if request is not event.request:
                event = msgspec.structs.replace(event, request=request)
        return event

    @property
    def num_live_requests(self) -> int:
        """The number of requests that have arrived and not ended."""
        return self._num_live_requests

    async def wait_idle(self) -> None:
        """Returns when no request is in flight."""
        await self._idle.wait()

    def request_refused(self, error: KvloomError) -> None:
        """Called when a link has rejected an invalid request by itself."""
        error.end = error.end or RequestEnd.REJECTED.value
        self._observer.request_refused(error)

    def tokens_credited(self, credit: Credit) -> None:
        """Called when a client has reported that metered tokens did not reach it."""
        self._observer.tokens_credited(credit)

    def answers_discarded(self, client_id: str, request_ids: Sequence[str]) -> None:
        """Called by a link, after the cancels that came before."""
        self._observer.answers_discarded(client_id, request_ids)

    def close(self) -> None:
        """Stops the ticks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- actions ------------------------------------------------------------------------------------------------------

    def _send_step(self, action: SendStep) -> None:
        client = self._clients.get(action.client_id)
        if client is not None:
            client.send_step(action.step)

    def _submit(self, action: SubmitAttempt) -> None:
        shard = self._shards.get(action.shard_id)
        if shard is not None:
            shard.submit(action)

    def _cancel(self, action: CancelOnShard) -> None:
        shard = self._shards.get(action.shard_id)
        if shard is not None:
            shard.cancel(action)

    def _want_kv_snapshot(self, action: WantKvSnapshot) -> None:
        shard = self._shards.get(action.shard_id)
        if shard is not None:
            shard.want_kv_snapshot()

    def _check_prompt(self, action: CheckPrompt) -> None:
        if self._safety is not None:
            self._safety.check_prompt(action)

    def _screen_answers(self, action: ScreenAnswers) -> None:
        if self._safety is not None:
            self._safety.screen_answers(action)

    def _on_request_ended(self, action: RequestEnded) -> None:
        self._num_live_requests -= 1
        if not self._num_live_requests:
            self._idle.set()
        if action.client_id == JUDGE_CLIENT_ID:
            self._observer.own_request_ended(action)
        else:
            self._report_end(action)

    def _on_completed(self, action: AnswerCompleted) -> None:
        if self._keeper is not None:
            self._keeper.completed(action)

    def _on_flagged(self, action: AnswerFlagged) -> None:
        if self.note_flagged is not None:
            self.note_flagged(action)

    def _report_tapped_end(self, ended: RequestEnded) -> None:
        is_own = [tap.ended(ended) for tap in self._taps]  # each of them is told
        if any(is_own):
            self._observer.own_request_ended(ended)
        else:
            self._observer.request_ended(ended)

    def _send_tapped_step(self, action: SendStep) -> None:
        for tap in self._taps:
            tap.stepped(action.client_id, action.step)
        self._send_step(action)

    def _on_tapped_placement(self, action: PlacementDecided) -> None:
        if not any(tap.is_own(action.request) for tap in self._taps):
            self._observer.placement_decided(action)

    def _on_fleet_changed(self, action: FleetChanged) -> None:
        for client in list(self._clients.values()):
            client.send_fleet(action)
        self._call_fleet_hooks()

    def _call_fleet_hooks(self) -> None:
        for hook in self._fleet_hooks:
            hook()

    def _arm_timer(self) -> None:
        """Schedules a tick for the core's next deadline. A timer that is earlier than that is kept, because one tick
        too many costs less than re-arming it for every frame."""
        deadline = self.core.next_deadline()
        if deadline is None:
            return
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        # The time is kept here because uvloop's handle has none if the callback is due at once.
        self._timer_at = max(deadline, self._loop.time() + MIN_TICK_SECONDS)
        self._timer = self._loop.call_at(self._timer_at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self.dispatch(Tick())
        except Exception:
            log.exception("core_tick_failed")
