"""What a router was told and what it did, written down from outside: the checkers' own view of it.

Made of nothing but events and actions; never of the core's state. A checker that relied on the core's own books would
share their errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.actions import Action, CancelOnShard, RequestEnded, SendStep, ShardHealthChanged, SubmitAttempt
from router.core.core import CoreConfig
from router.core.dispatch.attempt_sender import PROBE_CLIENT_ID
from router.core.events import (
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
from router.core.relay.lifecycle import MAX_MOVES, RETRYABLE_REASONS
from tools.dst.violation import Violation
from tools.dst.witness.seen import SeenChoice, SeenRequest, SeenShard, State

if TYPE_CHECKING:
    from tools.dst.checkers import Checks
    from tools.dst.nodes.router_node import RouterNode


class Witness:
    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.shards: dict[str, SeenShard] = {}
        self.live: dict[str, SeenRequest] = {}
        self.models: set[str] = set()
        """Ever served."""
        self.policy: tuple[bool, bool] | None = None
        """Whether the safety service screens prompts and answers; None: it is away."""
        self.safety_waited_for_until: float | None = None
        """It is away, and what needs it waits until then."""
        self.arriving: SeenRequest | None = None
        """The request of the event at hand, admitted or refused."""
        self._former: SeenRequest | None = None
        """It bore the name of `arriving` until it ended in the event at hand."""
        self.gone_client = ""
        self.now = 0.0
        """When the event at hand came."""
        self.event: Event | None = None
        """The one at hand."""
        self._moving: list[SeenChoice] = []
        self._waiting: list[SeenRequest] | None = None
        """As last counted; None: something has changed since."""
        self._choices: dict[tuple[str, int], SeenChoice] = {}
        """By client and its slot: choices that have not ended."""

    def waiting(self) -> list[SeenRequest]:
        """Requests with choices that run nowhere and have not ended."""
        if self._waiting is None:
            self._waiting = [seen for seen in self.live.values() if seen.is_waiting]
        return self._waiting

    # -- events -------------------------------------------------------------------------------------------------------

    def take_event(self, event: Event, now: float) -> None:
        """Before the core handles it."""
        self.event = event
        self.now = now
        self._waiting = None
        self.arriving = None
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
                    shard.load = event.load
                    shard.is_draining = event.load.draining
                    shard.hands_over = event.load.draining and event.load.hand_over
            case ShardUp():
                self._lose_shard(event.shard.shard_id)
                self.models.add(event.shard.model)
                self.shards[event.shard.shard_id] = SeenShard(event.shard)
            case ShardDown():
                self._lose_shard(event.shard_id)
            case ClientGone():
                self.gone_client = event.client_id
            case SafetyUp():
                self.policy = (event.screens_prompts, event.screens_answers)
                self.safety_waited_for_until = None
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
        # While the service is waited for nobody knows its next policy, so that it has to look at everything.
        policy = self.policy if self.safety_waited_for_until is None else (True, True)
        seen = self.arriving = SeenRequest(event.request, now, self.config, policy)
        seen.is_duplicate = event.request.request_id in self.live
        for choice in seen.choices:
            self._choices[event.request.client_id, choice.spec.slot] = choice
        if not seen.is_duplicate:
            self.live[event.request.request_id] = seen

    def _take_step(self, shard: SeenShard, step: Step) -> None:
        shard.ramp_up(sum(start.slot in shard.open for start in step.starts))
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
            self._drop_prefill_chunk(shard, finish.slot)
            if choice is not None:
                reason = 0 if finish.error is None else finish.error.reason
                if reason == ErrorReason.ERROR_REASON_DRAINING and choice.num_moves < MAX_MOVES:
                    choice.num_moves += 1
                self._leave(choice, shard, can_retry=reason in RETRYABLE_REASONS)

    def _lose_shard(self, shard_id: str) -> None:
        shard = self.shards.pop(shard_id, None)
        if shard is not None:
            for slot in list(shard.open):
                self._drop_prefill_chunk(shard, slot)
                choice = shard.current(slot)
                if choice is not None:
                    self._leave(choice, shard, can_retry=True)

    def _leave(self, choice: SeenChoice, shard: SeenShard, *, can_retry: bool) -> None:
        """It runs there no more: it waits for another shard, or its end is near."""
        choice.place = None
        choice.state = State.OVER
        if can_retry and choice.num_failures < self.config.max_attempts and not choice.is_at_limit:
            choice.state = State.WAITING
            choice.request.avoid_shard_id = shard.description.shard_id

    # -- actions ------------------------------------------------------------------------------------------------------

    def take_actions(self, actions: Sequence[Action], checks: Checks, node: RouterNode) -> None:
        """After the core has handled the event. The checkers hear of every part just before it is written down."""
        ended = [action for action in actions if isinstance(action, RequestEnded)]
        self._leave_name(actions)
        for end in ended:
            self._note_ending(end)
        if isinstance(self.event, ShardUp):
            self._ramp(self.shards[self.event.shard.shard_id])
        for action in actions:
            self._waiting = None
            match action:
                case SendStep():
                    self._take_news(action, checks, node)
                case SubmitAttempt() if action.request.client_id == PROBE_CLIENT_ID:
                    checks.on_probe(node, action)
                    self.shards[action.shard_id].open[action.choices[0].slot] = None
                case SubmitAttempt() if action.prepares:
                    seen = self.live.get(action.prepares)
                    checks.on_prefill_chunk(node, seen, action)
                    self._take_prefill_chunk(seen, action)
                case SubmitAttempt():
                    seen = self.live.get(action.request.request_id)
                    checks.on_dispatch(node, seen, action)
                    if seen is not None:
                        self._take_attempt(seen, action)
                case CancelOnShard():
                    self._take_cancel(action)
                case ShardHealthChanged():
                    checks.on_health(node, action)
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
            self._take_end(end, checks, node)

    def _leave_name(self, actions: Sequence[Action]) -> None:
        """The last bearer of the arriving request's name may have been overdue: it ended just before."""
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

    def _ramp(self, shard: SeenShard) -> None:
        """Who comes up while requests wait gets little at first. Those that were overdue wait no more."""
        ramp_start = self.config.overload.ramp_start_requests
        self._waiting = None
        if ramp_start is not None and self.waiting():
            shard.limit = min(shard.limit, ramp_start)

    def _bearer(self, end: RequestEnded) -> SeenRequest | None:
        """Of the name of what ended."""
        former, arriving = self._former, self.arriving
        if former is not None and former.request.request_id == end.request_id and not former.num_ends:
            return former
        if arriving is not None and arriving.is_duplicate and arriving.request.request_id == end.request_id:
            return arriving
        return self.live.get(end.request_id)

    def _note_ending(self, end: RequestEnded) -> None:
        """From now on it does not wait, whatever comes first in the list of actions."""
        seen = self._bearer(end)
        if seen is self._former and seen is not None and seen.is_ending:
            seen = self.live.get(end.request_id)  # both end in one event
        if seen is not None:
            seen.is_ending = True

    def _take_attempt(self, seen: SeenRequest, action: SubmitAttempt) -> None:
        seen.num_attempts += 1
        shard = self.shards[action.shard_id]
        for spec in action.choices:
            choice = seen.choice(spec.index)
            choice.state = State.RUNNING
            choice.placed_at = self.now
            choice.num_attempts += 1
            choice.limit = action.max_tokens
            choice.place = (action.shard_id, spec.slot)
            shard.open[spec.slot] = choice

    def _take_prefill_chunk(self, seen: SeenRequest | None, action: SubmitAttempt) -> None:
        slot = action.choices[0].slot
        self.shards[action.shard_id].open[slot] = None
        if seen is not None:
            seen.num_prefill_chunks += 1
            seen.prefill_chunk = (action.shard_id, slot)

    def _drop_prefill_chunk(self, shard: SeenShard, slot: int) -> None:
        """It has ended, or will."""
        for seen in self.live.values():
            if seen.prefill_chunk == (shard.description.shard_id, slot):
                seen.prefill_chunk = None

    def _take_cancel(self, action: CancelOnShard) -> None:
        shard = self.shards.get(action.shard_id)
        for slot in action.slots:
            if shard is None:
                continue
            self._drop_prefill_chunk(shard, slot)
            choice = shard.current(slot)
            if choice is not None:
                choice.place = None
                choice.state = State.MOVING
                self._moving.append(choice)
                choice.num_moves += 1  # unless it ends, which the same event says, it is moved

    def _take_news(self, action: SendStep, checks: Checks, node: RouterNode) -> None:
        step = action.step
        checks.on_step(node, action)
        for start in step.starts:
            self._choice(action.client_id, start.slot).num_starts += 1
        position = 0
        for i, (slot, delta) in enumerate(zip(step.slots, step.deltas, strict=True)):
            count = step.num_tokens[i] if step.num_tokens else 1
            choice = self._choice(action.client_id, slot)
            checks.on_sent(node, choice, step.token_ids[position : position + count], delta)
            choice.num_sent_tokens += count
            choice.sent_text += delta
            position += count
        finished: list[tuple[SeenChoice, Finish]] = []
        for finish in step.finishes:
            choice = self._choice(action.client_id, finish.slot)
            del self._choices[action.client_id, finish.slot]
            checks.on_finish(node, choice, finish)
            finished.append((choice, finish))
        for choice, finish in finished:  # together: what waits of a request is placed, or given up, as a whole
            self._finish(choice, finish)

    def _choice(self, client_id: str, slot: int) -> SeenChoice:
        choice = self._choices.get((client_id, slot))
        if choice is None:
            raise Violation("ends_once", f"{client_id} got news of slot {slot}, which it does not use")
        return choice

    def _finish(self, choice: SeenChoice, finish: Finish) -> None:
        choice.state = State.DONE
        choice.place = None
        choice.finish_reason = finish.reason

    def _take_end(self, end: RequestEnded, checks: Checks, node: RouterNode) -> None:
        seen = self._bearer(end)
        if seen is not None and self.live.get(end.request_id) is seen:
            del self.live[end.request_id]
        checks.on_ended(node, seen, end)
        if seen is not None:
            seen.num_ends += 1
