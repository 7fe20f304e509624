"""The router core: events in, actions out. It has no I/O, no clock and no randomness of its own.

    core = RouterCore(CoreConfig(), seed=1)
    actions = core.handle(event, now)

The same core runs in the service, in the trace simulator and in the deterministic simulation tests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from kvloom.errors import KvloomError
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR
from router.core import events as ev
from router.core import integrity
from router.core.action_buffer import ActionBuffer
from router.core.actions import Action, FleetChanged, RequestEnded
from router.core.admission.arrivals import Arrivals
from router.core.admission.cancellation import Cancellation
from router.core.admission.deadlines import Deadlines
from router.core.admission.outage import Outage
from router.core.admission.requests_awaiting_lease import RequestsAwaitingLease
from router.core.brownout.brownout import Brownout
from router.core.core_config import CoreConfig
from router.core.degradation import Degradation
from router.core.dispatch.attempt_sender import AttemptSender
from router.core.dispatch.fair_shares import FairShares
from router.core.dispatch.overload import OverloadGuard, retry_after_seconds
from router.core.dispatch.refusals import (
    check_shard,
    deadline_exceeded,
    draining,
    queue_timeout,
    shard_departed,
    shard_lost,
)
from router.core.dispatch.service_counters import ServiceCounters
from router.core.dispatch.starts import StartEstimate, Starts
from router.core.events import Event, Request, TierRank
from router.core.fleet.fleet import Fleet, Shard, ShardState
from router.core.fleet.shard_health import HealthState
from router.core.health.departing_shards import DepartingShards
from router.core.health.health_watch import HealthWatch
from router.core.health.migrator import Migrator
from router.core.live import LiveRequest, StreamClient
from router.core.load.load_ledger import LoadLedger
from router.core.placement import PlacementPlan, built_in_policy
from router.core.placement.candidates import CandidateBuilder
from router.core.placement.eligibility import Eligibility
from router.core.placement.placer import Placer
from router.core.placement.policy import Policy
from router.core.prefix_index.prefix_index import PrefixIndex
from router.core.relay.deferred_frames import DeferredFrames
from router.core.relay.lifecycle import Lifecycle, request_progress
from router.core.relay.relay import Relay
from router.core.relay.screening import Screening
from router.core.relay.verdicts import Verdicts
from router.core.shard_event_handler import ShardEventHandler, check_frame, check_step
from router.core.tenancy.limiter import Limiter

__all__ = ["CoreConfig", "RouterCore"]


class RouterCore:
    """Deterministic: the same events at the same times with the same seed give the same actions.

    Raises ValueError for a policy or an answer mode that does not exist.
    """

    def __init__(self, config: CoreConfig, seed: int = 0, limiter: Limiter | None = None) -> None:
        """Without `limiter`, nobody has limits."""
        self.limiter = limiter
        self.config = config
        self._action_buffer = ActionBuffer()
        self._fleet = Fleet(config.expected_models)
        self._index = PrefixIndex()
        self._ledger = LoadLedger()
        self._screening = Screening(self._action_buffer)
        self._deadlines = Deadlines()
        policy = built_in_policy(config.policy) if config.plugin_policy is None else config.plugin_policy()
        fair_shares = FairShares(
            config.fairness, self._fleet, self._ledger, config.classes, sends_at_once=policy.hold is None
        )
        eligibility = Eligibility(self._fleet, fair_shares.must_leave_room, fair_shares.may_leave_room)
        candidates = CandidateBuilder(eligibility, self._index, self._ledger)
        self._placer = Placer(
            self._fleet, eligibility, candidates, self._ledger, policy, seed, config.decision_sample_share
        )
        self._attempt_sender = AttemptSender(
            self._fleet,
            self._index,
            self._ledger,
            self._placer,
            self._action_buffer,
            config.prefill_chunks,
            fair_shares,
            ServiceCounters(),
            config.disaggregation,
            config.handoffs,
            self._deadlines.add,
        )
        self._brownout: Brownout | None = None
        """None: no answer is ever degraded."""
        if config.brownout is not None:
            self._brownout = Brownout(
                config.brownout,
                self._action_buffer,
                self._fleet.brownout_steps,
                self._note_fleet_change,
                retry_after_seconds,
            )
        self._overload = OverloadGuard(config.overload, self._attempt_sender.queue, config.max_queue_seconds)
        self._starts = Starts(self._fleet, self._ledger, self._attempt_sender.queue, self._overload)
        self._lifecycle = Lifecycle(
            self._fleet,
            self._attempt_sender,
            self._screening,
            self._action_buffer,
            config.max_attempts,
            limiter=limiter,
            hook=self._brownout,
        )
        self._limits = (
            None
            if limiter is None
            else RequestsAwaitingLease(limiter, self._fleet, self._lifecycle, self._action_buffer)
        )
        self._outage = Outage(
            self._fleet, self._attempt_sender.queue, self._lifecycle, self._deadlines, config.overload
        )
        self._verdicts = Verdicts(self._lifecycle, self._screening, config)
        self._arrivals = Arrivals(
            config,
            self._fleet,
            self._placer,
            self._attempt_sender,
            self._overload,
            self._lifecycle,
            self._verdicts,
            self._deadlines,
            self._outage,
            self._action_buffer,
            self._limits,
            self._brownout,
        )
        relay = Relay(
            self._lifecycle,
            self._attempt_sender,
            self._ledger,
            self._screening,
            self._action_buffer,
            safety_required=config.safety_required,
        )
        migrator = Migrator(self._placer, self._attempt_sender, self._lifecycle, self._action_buffer)
        self._health = HealthWatch(
            config.health, self._fleet, self._ledger, self._attempt_sender, migrator, self._action_buffer
        )
        self._departing = DepartingShards(self._fleet, self._ledger, migrator, self._action_buffer)
        shard_events = ShardEventHandler(
            self._fleet,
            self._index,
            self._ledger,
            self._attempt_sender,
            relay,
            self._health,
            self._departing,
            self._action_buffer,
            serve_queue=self._serve_queue,
            note_fleet_change=self._note_fleet_change,
        )
        self._deferred = DeferredFrames(
            self._fleet, self._attempt_sender.queue, self._overload, relay, shard_events.handle_part
        )
        self.deadlines_stand = False
        """True when the last event left `next_deadline` unchanged."""
        self._sent_fleet = self._fleet.state()
        self._fleet_may_differ = False
        handlers: dict[type, Callable[[Any, float], None]] = {
            ev.RequestArrived: self._arrivals.on_request,
            **Cancellation(self._lifecycle, self._action_buffer).handlers,
            ev.ShardUp: self._on_shard_up,
            ev.ShardDown: self._on_shard_down,
            **shard_events.handlers,
            ev.SafetyUp: self._on_safety_up,
            ev.SafetyDown: self._on_safety_down,
            ev.PromptVerdict: self._verdicts.on_prompt,
            ev.AnswersScreened: self._verdicts.on_answers,
            ev.Tick: self._on_tick,
            ev.DrainStarted: self._on_drain_started,
            ev.DrainEnded: self._on_drain_ended,
        }
        if self._limits is not None:
            handlers[ev.LeasesGranted] = self._limits.on_leases
            handlers[ev.SideCallArrived] = self._limits.on_side_call
            handlers[ev.SideCallSettled] = self._limits.on_side_call_settled
        self._handlers = handlers
        checks: dict[type, Callable[[Any], None]] = {
            ev.StepArrived: check_step,
            ev.FrameArrived: check_frame,
            ev.TokensOnlyFrame: check_step,
            ev.ShardUp: _check_shard_up,
        }
        self._checks = checks
        """Checks of an event, made before anything changes."""

    # -- API ------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event and return the actions that follow. `now` never goes backwards.

        Raises KvloomError (PROTOCOL_VIOLATION) for a frame whose arrays do not fit together and for a shard with
        impossible sizes. Nothing has changed then, and the caller should break the stream that brought the event.
        """
        has_due = self._deadlines.has_due(now)
        self.deadlines_stand = False
        if type(event) is ev.TokensOnlyFrame and not has_due:
            sent = self._deferred.relay(event, now)
            if sent is not None:
                if not self._deferred.is_full:
                    self.deadlines_stand = True
                    return sent
                self._deferred.flush()
                return [*sent, *self._conclude(now)]
        check = self._checks.get(type(event))
        if check is not None:
            check(event)
        self._deferred.flush()
        if has_due:
            # Ticks may be late, by much if this process was stopped: expired requests must not be dispatched.
            self._expire(now)
        self._handlers[type(event)](event, now)
        return self._conclude(now)

    def plan(self, request: Request, now: float) -> PlacementPlan:
        """Explain where `request` would be placed, and how each shard compares. Nothing is placed."""
        self._deferred.flush()
        error = self._arrivals.refusal(request)
        if error is not None:
            return PlacementPlan(len(request.prompt_token_ids), (), error=error)
        return self._placer.plan(LiveRequest(request, StreamClient(request.client_id), now), now)

    def expected_degradation(self, request: Request) -> Degradation | None:
        """How the answer would be degraded if the request arrived now."""
        return None if self._brownout is None else self._brownout.preview(request)

    def prefers_others(self, model: str, tier: TierRank) -> bool:
        """True when a request that names several models should go to another one, since this one is overloaded."""
        return self._brownout is not None and self._brownout.prefers_others(model, tier)

    def has_request(self, request_id: str) -> bool:
        """True when a request of this name is live."""
        return request_id in self._lifecycle.requests

    def use_policy(self, policy: Policy) -> None:
        """Place what arrives from now on by another policy: what an incident would have been with it."""
        self._placer.use_policy(policy)

    def is_explained(self, request_id: str) -> bool:
        """True when placements of a request of this name are reported as PlacementDecided."""
        return self._placer.is_explained(request_id)

    def progress(self, arrived_before: float, now: float) -> list[RequestEnded]:
        """For each live request that arrived before that time, the record that there would be if it ended now."""
        self.write_back()
        return [
            request_progress(live, now)
            for live in self._lifecycle.requests.values()
            if live.arrived_at < arrived_before
        ]

    def oldest(self, is_wanted: Callable[[LiveRequest], bool], most: int, now: float) -> list[RequestEnded]:
        """The same for at most so many live requests, those first that arrived first."""
        self.write_back()
        wanted = filter(is_wanted, self._lifecycle.requests.values())
        return [request_progress(live, now) for live in itertools.islice(wanted, most)]

    def write_back(self) -> None:
        """Do what was put off: parts of frames, and tokens that the requests have not recorded yet."""
        self._deferred.flush()
        for shard in self._fleet.shards.values():
            shard.fast_path.write_back()

    def next_deadline(self) -> float | None:
        """The time at which a Tick is needed at the latest; None: not before another event."""
        at = min(
            self._deadlines.next(),
            self._verdicts.next_deadline(),
            self._attempt_sender.queue.next_deadline(),
            self._health.next_deadline(),
        )
        if self._limits is not None:
            at = min(at, self._limits.next_deadline())
        if self._departing.num_departing:
            at = min(at, self._departing.next_deadline())
        if self._brownout is not None:
            at = min(at, self._brownout.next_deadline())
        return None if at == math.inf else at

    @property
    def fleet(self) -> FleetChanged:
        """The state of the fleet that clients were last sent."""
        return self._sent_fleet

    def has_ready_shard(self, model: str) -> bool:
        """True when a shard accepts new requests for the model."""
        return bool(self._fleet.ready(model)) and not self._fleet.is_withdrawn(model)

    def has_spare_room(self, model: str) -> bool:
        """True when a request for the model would start at once and none of a client would wait for it: nothing waits
        for the model, and a shard has at most half of its batch to do."""
        if self._attempt_sender.queue.queues.num_waiting(model):
            return False
        return any(self._is_half_idle(shard) for shard in self._fleet.ready(model) if not shard.is_suspected)

    def _is_half_idle(self, shard: Shard) -> bool:
        view = self._ledger.view(shard.shard_id)
        num_sequences = len(shard.attempts) + view.foreign_running + view.foreign_waiting
        return 2 * num_sequences < shard.description.max_batch and shard.has_room

    def num_waiting(self, model: str) -> int:
        """The number of requests for the model that wait for a shard, of clients and of the router itself."""
        return self._attempt_sender.queue.queues.num_waiting(model)

    @property
    def shards(self) -> list[ShardState]:
        """The connected shards and their speeds."""
        self._deferred.flush()
        return [self._shard_state(shard) for shard in self._fleet.shards.values()]

    @property
    def num_queued_requests(self) -> int:
        """The number of requests that wait for a shard with room."""
        return len(self._attempt_sender.queue)

    def queued_by_model(self) -> dict[str, tuple[int, int]]:
        """How many requests have not been sent to a shard yet, and how many prompt tokens they have together, of each
        model. Takes time in the number of live requests."""
        queues: dict[str, tuple[int, int]] = {}
        for live in self._lifecycle.requests.values():
            request = live.request
            if not live.num_attempts and request.client_id != ev.SHADOW_CLIENT_ID:
                num_requests, num_tokens = queues.get(request.model, (0, 0))
                queues[request.model] = (num_requests + 1, num_tokens + len(request.prompt_token_ids))
        return queues

    def starts(self, now: float) -> dict[str, StartEstimate]:
        """How soon an interactive request begins that arrives now, by model."""
        self._deferred.flush()
        names = [model.name for model in self._sent_fleet.models]
        return {name: start for name in names if (start := self._starts.of(name, now)) is not None}

    @property
    def is_idle(self) -> bool:
        """True when nothing is live, reserved or waiting for a verdict."""
        return not self._lifecycle.requests and not self._ledger.keys() and not self._screening.num_open

    def check_integrity(self) -> None:
        """Assert all invariants; for tests and simulation."""
        integrity.check(
            self._fleet, self._lifecycle, self._attempt_sender, self._placer, self._ledger, self._index, self._screening
        )
        if self._limits is not None:
            self._limits.check_integrity()

    def _conclude(self, now: float) -> list[Action]:
        """Do what follows every event, and return all resulting actions."""
        if self._fleet_may_differ:
            self._send_fleet(now)
        self._serve_queue(now)
        if self._outage.expire(now):
            self._serve_queue(now)  # for requests that waited behind the expired ones
        if self._fleet_may_differ:
            self._send_fleet(now)  # the ends of waiting requests may have changed the step of a brownout
        if self._limits is not None:
            self._limits.conclude(now)
        if self._action_buffer.clients:
            self._lifecycle.drop_idle_clients(self._action_buffer.clients)
        actions = self._action_buffer.take()
        self._overload.note_event(actions, now)
        return actions

    def _shard_state(self, shard: Shard) -> ShardState:
        view = self._ledger.view(shard.shard_id)
        return ShardState(
            description=shard.description,
            is_draining=shard.is_draining,
            health=HealthState.HEALTHY if shard.health is None else shard.health.state,
            prefill_tokens_per_second=view.report.prefill_tokens_per_second,
            decode_step_seconds=view.report.decode_step_seconds,
            prefill_seconds=view.speed.coefficients,
            load=view.report,
            is_asleep=shard.is_asleep,
            is_withdrawn=shard.is_withdrawn,
            adapters=[adapter.name for adapter in shard.adapters.states],
        )

    # -- shards ---------------------------------------------------------------------------------------------------

    def _on_shard_up(self, event: ev.ShardUp, now: float) -> None:
        shard_id = event.shard.shard_id
        if shard_id in self._fleet.shards:
            self._on_shard_down(ev.ShardDown(shard_id), now)
        shard = self._fleet.add(event.shard)
        if len(self._attempt_sender.queue):
            shard.limit = min(shard.limit, self.config.overload.ramp_start_requests)
        self._health.on_shard_up(shard, now)
        growth_tokens = 0 if event.shard.reserves_output else event.shard.block_size
        self._ledger.add_shard(
            shard_id, event.shard.model, event.shard.num_blocks, event.shard.yield_tokens, growth_tokens
        )
        # Twice, because a batch may store blocks before it removes those that they replace.
        self._index.add_shard(shard_id, 2 * event.shard.num_blocks, now)
        self._note_fleet_change()

    def _on_shard_down(self, event: ev.ShardDown, now: float) -> None:
        shard = self._fleet.shards.get(event.shard_id)
        if shard is None:
            return
        lost, preparing = self._attempt_sender.end_all_slots(shard)
        self._action_buffer.drop_cancels(event.shard_id)
        self._attempt_sender.queue.requeue_all(shard, now)
        self._health.on_shard_down(shard)
        self._departing.on_shard_down(shard)
        self._fleet.remove(event.shard_id)
        self._ledger.remove_shard(event.shard_id)
        self._index.remove_shard(event.shard_id)
        is_noticed = shard.departure is not None
        error = shard_departed() if is_noticed else shard_lost()
        for choice in lost:
            self._lifecycle.retry(choice, error, event.shard_id, now, is_noticed=is_noticed)
        self._attempt_sender.legs.on_shard_lost(preparing, now)
        self._note_fleet_change()

    # -- safety, time ---------------------------------------------------------------------------------------------

    def _on_safety_up(self, event: ev.SafetyUp, now: float) -> None:
        self._screening.set_up(
            screens_prompts=event.screens_prompts,
            screens_answers=event.screens_answers,
            prefilter=event.prefilter,
            prompt_filter=event.prompt_filter,
        )
        self._verdicts.on_up(now)

    def _on_safety_down(self, _event: ev.SafetyDown, now: float) -> None:
        self._verdicts.on_down(now)

    def _on_tick(self, _event: ev.Tick, now: float) -> None:
        self._index.settle()
        self._health.on_tick(now)
        self._departing.on_tick(now)
        self._verdicts.expire(now)
        if self._brownout is not None:
            self._brownout.pass_time(now)
        for preemption in self._attempt_sender.queue.preemptions(now):
            self._lifecycle.preempt(preemption, now)

    def _expire(self, now: float) -> None:
        """End requests whose time has run out."""
        is_leg_over = False
        for live in self._deadlines.pop_due(now):
            error = self._expiry(live, now)
            if error is not None:
                self._lifecycle.end_request(live, FINISH_REASON_ERROR, error, now)
            elif live.split is not None and live.split.attempt is not None and now >= live.split.leg_expires_at:
                self._attempt_sender.legs.expire(live, now)
                is_leg_over = True
            else:
                self._outage.overdue.append(live)
        if is_leg_over:
            self._serve_queue(now)  # a request that arrives in this event would find a queue that is full of these

    def _expiry(self, live: LiveRequest, now: float) -> KvloomError | None:
        if now >= live.deadline:
            return deadline_exceeded(live)
        if live.is_queued and live.first_dispatched_at is None and now >= live.queue_deadline:
            if self._overload.waits_for_deadline(live):
                return deadline_exceeded(live)
            return queue_timeout(live.request.request_id, now - live.arrived_at)
        return None

    def _on_drain_started(self, _event: ev.DrainStarted, _now: float) -> None:
        self._fleet.is_draining = True
        self._note_fleet_change()

    def _on_drain_ended(self, _event: ev.DrainEnded, now: float) -> None:
        for request_id, live in list(self._lifecycle.requests.items()):
            self._lifecycle.end_request(live, FINISH_REASON_ERROR, draining(request_id), now)

    def _serve_queue(self, now: float) -> None:
        """Dispatch waiting requests that can have a shard now, and find those that no shard can serve."""
        queue = self._attempt_sender.queue
        if queue.queues.num_requests:
            if queue.check_unschedulable:
                self._outage.find_unschedulable(now)
            queue.serve(now)

    def _note_fleet_change(self) -> None:
        self._fleet_may_differ = True
        self._attempt_sender.queue.check_unschedulable = True

    def _send_fleet(self, now: float) -> None:
        self._fleet_may_differ = False
        self._attempt_sender.queue.leave_last_resorts(now)
        state = self._fleet.state()
        if state != self._sent_fleet:
            self._sent_fleet = state
            self._action_buffer.add(state)


def _check_shard_up(event: ev.ShardUp) -> None:
    check_shard(event.shard)
