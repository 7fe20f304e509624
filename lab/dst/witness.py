"""The checkers' own record of a router, reconstructed from the events that it received and the actions that it took.

The witness never reads the core's state: a checker that relied on it would share its errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH
from lab.dst.checker import Hooks, Violation
from lab.dst.observed import (
    AttemptDeparture,
    ObservedChoice,
    ObservedHandoff,
    ObservedLeg,
    ObservedRequest,
    ObservedShard,
    State,
)
from lab.dst.views import SimulatedRouterView
from router.core.actions import (
    Action,
    CancelOnShard,
    LimitsCounted,
    RequestEnded,
    SendStep,
    SequencesPreempted,
    ShardHealthChanged,
    SubmitAttempt,
)
from router.core.core import CoreConfig
from router.core.dispatch.attempt_sender import PROBE_CLIENT_ID
from router.core.dispatch.fair_shares import MAX_MOVES
from router.core.events import (
    AdaptersReported,
    ClientGone,
    Event,
    LoadReported,
    RequestArrived,
    SafetyDown,
    SafetyUp,
    ShardDown,
    ShardUp,
    StepArrived,
    Tick,
)
from router.core.fleet.shard_health import HealthState
from router.core.frames import Finish, Step
from router.core.relay.lifecycle import MAX_STRIKES, RETRYABLE_REASONS

GIVEN_UP: Final = (
    ErrorReason.ERROR_REASON_NO_SHARD_READY,
    ErrorReason.ERROR_REASON_SHARD_LOST,
    ErrorReason.ERROR_REASON_ENGINE_FAILED,
)
"""Why a request ends for which no shard has come in time: that there is none, or how its last attempt failed."""


class Witness:
    """A router as seen from outside."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.shards: dict[str, ObservedShard] = {}
        self.live: dict[str, ObservedRequest] = {}
        self.contended: set[str] = set()
        """Models for which sequences of a tenant have been preempted."""
        self.models: set[str] = set()
        """Models that a shard has served, without those whose last shard left after it was withdrawn."""
        self.has_served = False
        """True when a shard has ever been connected."""
        self.policy: tuple[bool, bool] | None = None
        """True when the safety service screens prompts and answers. None means that it is down."""
        self.safety_waited_for_until: float | None = None
        """While the service is down, requests that need it wait until then."""
        self.arriving: ObservedRequest | None = None
        """The request of the current event, admitted or rejected."""
        self._former: ObservedRequest | None = None
        """The request with the id of `arriving` that ended in the current event."""
        self.gone_client = ""
        self.now = 0.0
        """The time of the current event."""
        self.event: Event | None = None
        """The current event."""
        self.handed_over: list[ObservedHandoff] = []
        """The hand-offs that came with the current event, whether they are wanted or not."""
        self.dispatched: list[ObservedRequest] = []
        """The requests that were sent to shards in the current event."""
        self.given_up: list[ObservedRequest] = []
        """The requests that are given up at the end of the current event, since it brought no shard for them."""
        self._moving: list[ObservedChoice] = []
        self._waiting: list[ObservedRequest] | None = None
        """A cache for `waiting`. None means that something has changed since."""
        self._choices: dict[tuple[str, int], ObservedChoice] = {}
        """The choices that have not ended, by client and slot."""

    def waiting(self) -> list[ObservedRequest]:
        """Requests with choices that are queued: they have not ended and run on no shard."""
        if self._waiting is None:
            self._waiting = [observed for observed in self.live.values() if observed.is_waiting]
        return self._waiting

    def knows(self, model: str) -> bool:
        """True when requests for the model may be sent again later if they cannot be served now."""
        return model in self.models or not self.has_served

    def may_wait_for_start(self, model: str) -> bool:
        """True when a new request waits for the first shard of its model."""
        served = (shard for shard in self.shards.values() if shard.description.model == model)
        return self.config.overload.start_patience_seconds > 0 and all(shard.is_draining for shard in served)

    def patience_seconds(self, observed: ObservedRequest) -> float:
        """How long a request waits for a shard when there is none."""
        overload = self.config.overload
        if observed.num_attempts:
            return overload.outage_patience_seconds
        return max(overload.outage_patience_seconds, overload.start_patience_seconds)

    def refuses(self, observed: ObservedRequest) -> bool:
        """True when the model or the adapter of a request that arrives now does not exist, or takes no new requests."""
        model = observed.request.model
        if not self.knows(model) or (self.is_withdrawn(model) and not observed.is_continued):
            return True
        shards = [shard for shard in self.shards.values() if shard.description.model == model]
        is_served = any(not shard.is_draining for shard in shards)
        return is_served and not any(shard.has_adapter_of(observed) for shard in shards)

    def keeps(self, observed: ObservedRequest) -> bool:
        """True when a request for which there is no shard waits until its deadline, as its last one was stopped on
        purpose and another may come."""
        request = observed.request
        if (
            observed.left_by is AttemptDeparture.FAILURE
            or not self.knows(request.model)
            or self.is_withdrawn(request.model)
        ):
            return False
        shards = [shard for shard in self.shards.values() if shard.description.model == request.model]
        return not shards or any(shard.has_adapter_of(observed) for shard in shards)

    def is_withdrawn(self, model: str) -> bool:
        """True when all shards of the model are withdrawn."""
        shards = [shard for shard in self.shards.values() if shard.description.model == model]
        return bool(shards) and all(shard.is_withdrawn for shard in shards)

    def has_room(self, shard: ObservedShard, observed: ObservedRequest) -> bool:
        """True when the shard certainly has room for that request's tenant and class."""
        if self.config.classes:
            return False  # it may be left to others
        if self.config.fairness is not None and shard.may_finish_prefill_first(observed.request.tenant):
            return False
        fairness = self.config.fairness if shard.description.model in self.contended else None
        return shard.has_room and not shard.may_be_left_free(observed.request.tenant, fairness)

    # -- events -------------------------------------------------------------------------------------------------------

    def take_event(self, event: Event, now: float) -> None:
        """Record an event before the core handles it."""
        self.event = event
        self.now = now
        self._waiting = None
        self.arriving = None
        self.dispatched.clear()
        self.given_up.clear()
        self.handed_over.clear()
        self.gone_client = ""
        match event:
            case StepArrived():
                shard = self.shards.get(event.shard_id)
                if shard is not None:
                    self._take_step(shard, event.step)
            case RequestArrived():
                self._take_request(event, now)
            case LoadReported():
                shard = self.shards.get(event.shard_id)
                if shard is not None:
                    shard.note_load(event.load)
                    shard.is_draining = event.load.draining
                    shard.is_withdrawn = event.load.withdrawn
                    shard.hands_over = event.load.draining and event.load.hand_over
                    shard.note_notice(event.load.empty_within_seconds if event.load.draining else None, now)
            case AdaptersReported():
                shard = self.shards.get(event.shard_id)
                if shard is not None:
                    shard.adapters = {state.name: state.checksum for state in event.adapters}
            case ShardUp():
                self._lose_shard(event.shard.shard_id)
                self.models.add(event.shard.model)
                self.has_served = True
                self.shards[event.shard.shard_id] = ObservedShard(event.shard)
            case ShardDown():
                self._lose_shard(event.shard_id)
            case ClientGone():
                self.gone_client = event.client_id
            case SafetyUp():
                self.policy = (event.screens_prompts, event.screens_answers)
                self.safety_waited_for_until = None
                for observed in self.live.values():
                    observed.note_policy(*self.policy)
            case SafetyDown():
                if self.policy is not None and self.config.safety_patience_seconds > 0:
                    self.safety_waited_for_until = now + self.config.safety_patience_seconds
                self.policy = None
            case Tick():
                if self.safety_waited_for_until is not None and now >= self.safety_waited_for_until:
                    self.safety_waited_for_until = None
            case _:
                pass

    def _take_request(self, event: RequestArrived, now: float) -> None:
        # While the service is waited for its next policy is unknown, so that it has to screen everything.
        policy = self.policy if self.safety_waited_for_until is None else (True, True)
        observed = self.arriving = ObservedRequest(event.request, now, self.config, policy)
        observed.is_duplicate = event.request.request_id in self.live
        if self.may_wait_for_start(event.request.model):
            patience_seconds = self.patience_seconds(observed)
            observed.queue_deadline = min(observed.deadline, observed.queue_deadline + patience_seconds)
        for choice, cached in zip(observed.choices, event.cached, strict=False):
            choice.emitted += cached.token_ids
            if cached.finish.reason == FINISH_REASON_LENGTH:
                choice.limit = len(cached.token_ids)
        for choice in observed.choices:
            self._choices[event.request.client_id, choice.spec.slot] = choice
        if not observed.is_duplicate:
            self.live[event.request.request_id] = observed

    def _take_step(self, shard: ObservedShard, step: Step) -> None:
        shard.ramp_up(sum(start.slot in shard.open for start in step.starts))
        shard.started.update(start.slot for start in step.starts)
        position = 0
        for i, slot in enumerate(step.slots):
            count = step.num_tokens[i] if step.num_tokens else 1
            choice = shard.current(slot)
            if choice is not None:
                choice.emitted += step.token_ids[position : position + count]
            position += count
        for finish in step.finishes:
            choice = shard.current(finish.slot)
            shard.open.pop(finish.slot, None)
            shard.started.discard(finish.slot)
            is_leg = shard.leg_tenants.pop(finish.slot, None) is not None
            self._drop_prefill(shard, finish.slot, finish.handoff)
            if finish.handoff and is_leg:
                self.handed_over.append(ObservedHandoff(finish.handoff, shard.description))
            elif finish.handoff and choice is not None and choice.request.sent_handoff is not None:
                choice.request.handoff = choice.request.sent_handoff
                self.handed_over.append(choice.request.sent_handoff)
            if choice is not None:
                reason = 0 if finish.error is None else finish.error.reason
                is_drained = reason == ErrorReason.ERROR_REASON_DRAINING
                if reason in (0, ErrorReason.ERROR_REASON_ENGINE_FAILED) and finish.reason == FINISH_REASON_ERROR:
                    self._strike(choice)
                self._leave(choice, shard, can_retry=reason in RETRYABLE_REASONS, is_drained=is_drained)

    def _lose_shard(self, shard_id: str) -> None:
        shard = self.shards.pop(shard_id, None)
        if shard is not None:
            model = shard.description.model
            if shard.is_withdrawn and all(other.description.model != model for other in self.shards.values()):
                self.models.discard(model)
            for slot in list(shard.open):
                self._drop_prefill(shard, slot)
                choice = shard.current(slot)
                if choice is not None:
                    if shard.empty_by is None:
                        self._strike(choice)
                    self._leave(choice, shard, can_retry=True, is_drained=shard.empty_by is not None)

    def _strike(self, choice: ObservedChoice) -> None:
        """A shard was lost or failed with a choice: twice without output is enough."""
        if not choice.emitted and not choice.request.num_legs:
            choice.num_strikes += 1

    def _leave(self, choice: ObservedChoice, shard: ObservedShard, *, can_retry: bool, is_drained: bool) -> None:
        """Record that a choice no longer runs on a shard: it is queued for another one, or about to end."""
        has_notice = shard.empty_by is not None
        choice.request.had_notice |= has_notice
        if is_drained and (has_notice or choice.num_moves < MAX_MOVES):
            choice.num_moves += 1
        choice.place = None
        choice.state = State.OVER
        is_exhausted = choice.num_failures >= self.config.max_attempts or choice.num_strikes >= MAX_STRIKES
        if can_retry and not is_exhausted and not choice.is_at_limit:
            choice.state = State.WAITING
            choice.request.avoid_shard_id = shard.description.shard_id
            how = AttemptDeparture.NOTICE if has_notice else AttemptDeparture.DRAIN
            choice.request.left_by = how if is_drained else AttemptDeparture.FAILURE

    # -- actions ------------------------------------------------------------------------------------------------------

    def take_actions(self, actions: Sequence[Action], hooks: Hooks, node: SimulatedRouterView) -> None:
        """Record the actions of the event that the core has handled. Each hook is called just before its part is
        recorded."""
        ended = [action for action in actions if isinstance(action, RequestEnded)]
        self._find_former(actions)
        for end in ended:
            self._note_ending(end)
        if isinstance(self.event, ShardUp):
            self._ramp(self.shards[self.event.shard.shard_id])
        for action in actions:
            self._waiting = None
            match action:
                case SendStep():
                    self._take_client_step(action, hooks, node)
                case SubmitAttempt() if action.request.client_id == PROBE_CLIENT_ID:
                    hooks.on_probe(node, action)
                    self.shards[action.shard_id].open[action.choices[0].slot] = None
                case SubmitAttempt() if action.handoff and not action.attempt_id:
                    hooks.on_collection(node, action)
                    self.shards[action.shard_id].open[action.choices[0].slot] = None
                case SubmitAttempt() if action.prefill_only:
                    observed = self.live.get(action.prepares)
                    hooks.on_prefill_leg(node, observed, action)
                    self._take_prefill_leg(observed, action)
                case SubmitAttempt() if action.prepares:
                    observed = self.live.get(action.prepares)
                    hooks.on_prefill_chunk(node, observed, action)
                    self._take_prefill_chunk(observed, action)
                case SubmitAttempt():
                    observed = self.live.get(action.request.request_id)
                    hooks.on_dispatch(node, observed, action)
                    if observed is not None:
                        self._take_attempt(observed, action)
                case LimitsCounted():
                    if self.arriving is not None and ("all", "held") in action.counts:
                        self.arriving.is_held = True
                case CancelOnShard():
                    self._take_cancel(action)
                case SequencesPreempted():
                    hooks.on_preemption(node, action)
                    self._take_preemption(action)
                case ShardHealthChanged():
                    hooks.on_health(node, action)
                    shard = self.shards[action.shard_id]
                    if shard.is_suspected and action.state is not HealthState.SUSPECTED:
                        shard.limit = 1
                    shard.health = action.state
                case _:
                    pass
        for choice in self._moving:
            if choice.state is State.MOVING:
                choice.state = State.OVER
        self._moving.clear()
        self._waiting = None
        if self.gone_client:
            for key in [key for key in self._choices if key[0] == self.gone_client]:
                self._choices.pop(key).state = State.DONE
        for end in ended:
            self._take_end(end, hooks, node)

    def _find_former(self, actions: Sequence[Action]) -> None:
        """If an overdue request with the id of the arriving one has just ended, the arriving one is no duplicate."""
        self._former = None
        arriving = self.arriving
        if arriving is None or not arriving.is_duplicate:
            return
        former = self.live[arriving.request.request_id]
        finished = [
            self._choices.get((action.client_id, finish.slot))
            for action in actions
            if isinstance(action, SendStep)
            for finish in action.step.finishes
        ]
        if any(choice is not None and choice.request is former for choice in finished):
            self._former = former
            arriving.is_duplicate = False
            self.live[arriving.request.request_id] = arriving

    def _ramp(self, shard: ObservedShard) -> None:
        """A shard that comes up while requests are queued gets little work at first. Overdue requests do not count."""
        ramp_start = self.config.overload.ramp_start_requests
        self._waiting = None
        if self.waiting():
            shard.limit = min(shard.limit, ramp_start)

    def _request_of(self, end: RequestEnded) -> ObservedRequest | None:
        """The request that ended, among those that had its id during this event."""
        former, arriving = self._former, self.arriving
        if former is not None and former.request.request_id == end.request_id and not former.num_ends:
            return former
        if arriving is not None and arriving.is_duplicate and arriving.request.request_id == end.request_id:
            return arriving
        return self.live.get(end.request_id)

    def _note_ending(self, end: RequestEnded) -> None:
        """A request that ends in this event is not queued, whatever the order of the actions."""
        observed = self._request_of(end)
        if observed is self._former and observed is not None and observed.is_ending:
            observed = self.live.get(end.request_id)  # both end in one event
        if observed is not None:
            if end.error_reason in GIVEN_UP and observed.is_waiting and observed is not self.arriving:
                self.given_up.append(observed)
            observed.is_ending = True

    def _take_attempt(self, observed: ObservedRequest, action: SubmitAttempt) -> None:
        observed.num_attempts += 1
        observed.sent_handoff, observed.handoff = observed.handoff, None
        self.dispatched.append(observed)
        shard = self.shards[action.shard_id]
        for spec in action.choices:
            choice = observed.choice(spec.index)
            choice.state = State.RUNNING
            choice.placed_at = self.now
            choice.num_attempts += 1
            choice.limit = action.max_tokens
            choice.place = (action.shard_id, spec.slot)
            shard.open[spec.slot] = choice

    def _take_prefill_chunk(self, observed: ObservedRequest | None, action: SubmitAttempt) -> None:
        slot = action.choices[0].slot
        self.shards[action.shard_id].open[slot] = None
        if observed is not None:
            observed.num_prefill_chunks += 1
            observed.prefill_chunk = (action.shard_id, slot)

    def _take_prefill_leg(self, observed: ObservedRequest | None, action: SubmitAttempt) -> None:
        shard, slot = self.shards[action.shard_id], action.choices[0].slot
        shard.open[slot] = None
        shard.leg_tenants[slot] = action.request.tenant
        if observed is not None:
            observed.num_legs += 1
            observed.leg = ObservedLeg(shard.description, slot, self.now)
            self.dispatched.append(observed)

    def _drop_prefill(self, shard: ObservedShard, slot: int, handoff: bytes = b"") -> None:
        """Record that the prefill chunk or the leg in a slot has ended, or is about to."""
        former = () if self._former is None else (self._former,)
        for observed in (*self.live.values(), *former):
            if observed.prefill_chunk == (shard.description.shard_id, slot):
                observed.prefill_chunk = None
            leg = observed.leg
            if leg is not None and (leg.shard, leg.slot) == (shard.description, slot):
                observed.leg = None
                # A leg that has taken too long is given up before the event that ends it is looked at.
                is_late = self.now - leg.began_at >= self.config.disaggregation.leg_timeout_seconds
                observed.handoff = ObservedHandoff(handoff, leg.shard) if handoff and not is_late else None

    def _take_cancel(self, action: CancelOnShard) -> None:
        shard = self.shards.get(action.shard_id)
        for slot in action.slots:
            if shard is None:
                continue
            self._drop_prefill(shard, slot)
            choice = shard.current(slot)
            if choice is not None:
                choice.place = None
                choice.state = State.MOVING
                self._moving.append(choice)
                choice.num_moves += 1  # it is moved, unless the same event ends it

    def _take_preemption(self, action: SequencesPreempted) -> None:
        """The choices were cancelled just before."""
        shard = self.shards[action.shard_id]
        self.contended.add(shard.description.model)
        # With classes it may be one of them that had to wait, and not a tenant.
        if self.config.fairness is not None and not self.config.classes:
            for other in self.shards.values():
                if other.description.model == shard.description.model:
                    other.contended_until = self.now + self.config.fairness.contention_seconds
        for slot in action.slots:
            choice = shard.open.get(slot)
            if choice is not None and choice.state is State.MOVING:
                choice.state = State.WAITING

    def _take_client_step(self, action: SendStep, hooks: Hooks, node: SimulatedRouterView) -> None:
        step = action.step
        hooks.on_step(node, action)
        for start in step.starts:
            self._choice(action.client_id, start.slot).num_starts += 1
        position = 0
        for i, (slot, delta) in enumerate(zip(step.slots, step.deltas, strict=True)):
            count = step.num_tokens[i] if step.num_tokens else 1
            choice = self._choice(action.client_id, slot)
            hooks.on_sent(node, choice, step.token_ids[position : position + count], delta)
            choice.num_sent_tokens += count
            choice.sent_text += delta
            position += count
        finished: list[tuple[ObservedChoice, Finish]] = []
        for finish in step.finishes:
            choice = self._choice(action.client_id, finish.slot)
            del self._choices[action.client_id, finish.slot]
            hooks.on_finish(node, choice, finish)
            finished.append((choice, finish))
        for (
            choice,
            finish,
        ) in finished:  # together, because the queued choices of a request are placed or given up as a whole
            self._finish(choice, finish)

    def _choice(self, client_id: str, slot: int) -> ObservedChoice:
        choice = self._choices.get((client_id, slot))
        if choice is None:
            raise Violation("ends_once", f"{client_id} got an entry for slot {slot}, which it does not use")
        return choice

    def _finish(self, choice: ObservedChoice, finish: Finish) -> None:
        choice.state = State.DONE
        choice.place = None
        choice.finish_reason = finish.reason

    def _take_end(self, end: RequestEnded, hooks: Hooks, node: SimulatedRouterView) -> None:
        observed = self._request_of(end)
        if observed is not None and self.live.get(end.request_id) is observed:
            del self.live[end.request_id]
        hooks.on_ended(node, observed, end)
        if observed is not None:
            observed.num_ends += 1
