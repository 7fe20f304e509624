"""Admits or refuses new requests, and enters admitted ones into the queue."""

from __future__ import annotations

import math

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH, RESULT_CACHE_USE_MISS
from router.core import events as ev
from router.core.action_buffer import ActionBuffer
from router.core.admission.deadlines import Deadlines
from router.core.admission.outage import Outage
from router.core.admission.requests_awaiting_lease import RequestsAwaitingLease
from router.core.core_config import CoreConfig
from router.core.dispatch.attempt_sender import AttemptSender
from router.core.dispatch.dispatch_queue import DispatchQueue
from router.core.dispatch.overload import OverloadGuard, retry_after_seconds
from router.core.dispatch.refusals import check_names, check_servable, deadline_exceeded, safety_unavailable
from router.core.events import Request
from router.core.fleet.fleet import Fleet, Shard
from router.core.frames import Finish
from router.core.live import LiveRequest, StreamClient
from router.core.objectives import Cause, LiveObjectives
from router.core.placement.placer import Placer
from router.core.priority_classes import MAX_PLACED_RANK
from router.core.relay.lifecycle import Lifecycle, request_ended
from router.core.relay.verdicts import Verdicts
from router.core.request_end import RequestEnd
from router.core.request_hook import RequestHook
from router.core.request_usage import UsageMeter


class Arrivals:
    """Handles RequestArrived."""

    def __init__(
        self,
        config: CoreConfig,
        fleet: Fleet,
        placer: Placer,
        attempt_sender: AttemptSender,
        overload: OverloadGuard,
        lifecycle: Lifecycle,
        verdicts: Verdicts,
        deadlines: Deadlines,
        outage: Outage,
        action_buffer: ActionBuffer,
        limits: RequestsAwaitingLease | None = None,
        hook: RequestHook | None = None,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._placer = placer
        self._queue = attempt_sender.queue
        self._overload = overload
        self._lifecycle = lifecycle
        self._verdicts = verdicts
        self._deadlines = deadlines
        self._outage = outage
        self._action_buffer = action_buffer
        self._meters_usage = config.meters_usage
        self._max_held_tokens = config.max_uncleared_tokens
        self._limits = limits
        self._guard = ObjectivesGuard(placer, self._queue, overload)
        self._hook = hook
        if limits is not None:
            limits.resume = self._on_lease

    def refusal(self, request: Request, *, may_wait: bool = False) -> KvloomError | None:
        """The reason why no shard could serve the request, whatever the load; None when one could, or when it may wait
        for the first shard of its model."""
        error = check_servable(request, self._fleet, may_wait=may_wait)
        verdicts = self._verdicts
        if error is None and not (verdicts.applies_guardrails if request.guardrails else verdicts.can_admit):
            return safety_unavailable(request.request_id)
        return error

    def on_request(self, event: ev.RequestArrived, now: float) -> None:
        request = event.request
        client = self._lifecycle.client(request.client_id)
        timeout_seconds = request.timeout_seconds or self._config.request_timeout_seconds
        if request.objectives is not None:
            timeout_seconds = min(timeout_seconds, request.objectives.seconds_left)
        error = self.refusal(request, may_wait=self._outage.admits)
        error = error or check_names(request, client, self._lifecycle.requests)
        if error is None and not event.cached:  # a cached answer needs no shard
            error = self._overload_refusal(request, timeout_seconds, now)
            if error is None and self._hook is not None:
                admitted = self._hook.admit(request, lambda: self._predicted_wait_seconds(request, now), now)
                if isinstance(admitted, KvloomError):
                    error = admitted
                else:
                    request = admitted
        if error is not None:
            self._refuse(request, client, error, now)
            return
        live = LiveRequest(request, client, now)
        if event.ticket is not None:
            live.ticket, live.result_cache, live.kept_ends = event.ticket, event.result_cache, []
            live.cached = event.cached
        if self._meters_usage:
            live.usage = UsageMeter()
        live.deadline = now + timeout_seconds
        if live.objectives is not None and not event.cached:
            error = self._guard.refusal(live, live.objectives, now)
            if error is not None:
                self._refuse(request, client, error, now, live.objectives)
                return
        if self._limits is not None:
            error = self._limits.admit(live, now)
            if error is not None:
                self._refuse(request, client, error, now)
                return
            if live.is_held:
                self._lifecycle.add(live, client)
                self._deadlines.add(live.deadline, live)
                return
        self._begin(live, client, False, now)

    def _begin(self, live: LiveRequest, client: StreamClient, was_held: bool, now: float) -> None:
        """The request is admitted, if it has a place: it is queued."""
        request = live.request
        live.max_uncleared_tokens = max(1, self._max_held_tokens // len(request.choices))
        asked = request.max_tokens or math.inf
        limit = live.capped(asked)
        if limit < asked:
            live.is_exact = False  # it is not the whole answer to this request: not to be kept, nor attested
        if live.cached and max(len(choice.token_ids) for choice in live.cached) <= limit:
            # What it has was allowed by the policy in force: both are in its key.
            if live.charge is not None:
                live.charge.is_result_cache_hit = True
            live.is_admitted = True
            if not was_held:
                self._lifecycle.add(live, client)
            self._lifecycle.replay(live, live.cached, now)
            return
        if live.cached:  # a limit allows less than it has
            live.cached, live.result_cache = (), RESULT_CACHE_USE_MISS
        finished = [choice for choice in live.choices if choice.num_resumed_tokens >= limit and not choice.is_done]
        needs_shard = len(finished) < live.num_open_choices
        open_shards = self._placer.eligibility.open_shards(live) if needs_shard else []
        is_parked = (
            live.priority_class.rank > MAX_PLACED_RANK
            and needs_shard
            and (not open_shards or self._queue.must_park(live, now))
        )
        has_room = not is_parked and (bool(open_shards) or not needs_shard)
        if not has_room and not self._make_queue_place(live, now):
            error = self._overload.full(request, now)
            if was_held:
                self._lifecycle.end_request(live, FINISH_REASON_ERROR, error, now)
                return
            if self._limits is not None:
                self._limits.release(live)
            self._refuse(request, client, error, now)
            return
        live.is_admitted = True
        live.queue_deadline = self._overload.queue_deadline(live, live.deadline, now)
        self._overload.note_admitted(live, now)
        if not was_held:
            self._lifecycle.add(live, client)
            self._deadlines.add(live.deadline, live)
        self._verdicts.begin(live)
        for choice in finished:
            self._lifecycle.end(choice, FINISH_REASON_LENGTH, None, now)
        if live.num_open_choices:
            self._hand_over(live, open_shards, now, is_parked=is_parked, has_room=has_room)

    def _on_lease(self, live: LiveRequest, error: KvloomError | None, now: float) -> None:
        """A request is no longer held. The fleet may have changed meanwhile."""
        error = error or self.refusal(live.request, may_wait=self._outage.admits)
        if error is not None:
            self._lifecycle.end_request(live, FINISH_REASON_ERROR, error, now)
        else:
            self._begin(live, live.choices[0].client, True, now)

    def _overload_refusal(self, request: Request, timeout_seconds: float, now: float) -> KvloomError | None:
        error = self._overload.refusal(request, timeout_seconds, now)
        if error is not None and self._queue.can_make_room(request.model, request.tenant):
            return None  # the prediction counts the requests of a tenant that gives way
        return error

    def _predicted_wait_seconds(self, request: Request, now: float) -> float:
        """How long the request would wait, in the router and on its shard, as far as is known."""
        wait_seconds = self._queue.engine_wait_seconds(request.model, now)
        if self._queue.queues.num_waiting(request.model):
            wait_seconds += self._overload.wait_seconds(request, now) or 0.0
        return wait_seconds

    def _hand_over(
        self, live: LiveRequest, open_shards: list[Shard], now: float, *, is_parked: bool, has_room: bool
    ) -> None:
        """Enter the request into the queue, which places it now or later."""
        if is_parked:
            self._queue.park(live, now)
        else:
            self._queue.place(live, open_shards, now)
        if live.is_queued:
            if not open_shards and not self._queue.has_shard(live.request.model):
                self._outage.begin(live, now)
            self._deadlines.add(live.queue_deadline, live)
            # Under a policy that lets requests wait, one may wait although there is room, which shows only now. A
            # request with a prefill chunk in progress takes no place in the queue.
            is_over = self._queue.queues.num_untouched > self._config.max_queued_requests
            is_over = is_over and has_room and not live.has_prefill and not self._queue.go_to_idle(live, now)
            if is_over and not self._make_queue_place(live, now):
                error = self._overload.full(live.request, now)
                live.is_admitted = False
                self._lifecycle.end_request(live, FINISH_REASON_ERROR, error, now)
        self._deadlines.drop_ended(len(self._lifecycle.requests))

    def _make_queue_place(self, live: LiveRequest, now: float) -> bool:
        """Returns True when one more request may wait. A class yields to a more urgent one, and a tenant above its
        share to one below."""
        if self._queue.queues.num_untouched < self._config.max_queued_requests:
            return True
        victim = self._queue.queues.take_victim(live.request.tenant, live.priority_class.rank)
        if victim is None:
            return False
        error = self._overload.full(victim.request, now)
        self._lifecycle.end_request(victim, FINISH_REASON_ERROR, error, now)
        return True

    def _refuse(
        self,
        request: Request,
        client: StreamClient,
        error: KvloomError,
        now: float,
        objectives: LiveObjectives | None = None,
    ) -> None:
        step = self._action_buffer.step(client)
        error = error.ended(RequestEnd.REJECTED.value)
        num_prompt_tokens = len(request.prompt_token_ids)
        for slot in dict.fromkeys(choice.slot for choice in request.choices):
            if slot not in client.choices:
                step.finishes.append(Finish(slot, FINISH_REASON_ERROR, num_prompt_tokens, error=error))
        rejected = LiveRequest(request, client, now)
        if self._meters_usage:
            rejected.usage = UsageMeter()  # there is no record of it, but its key is told
        if objectives is not None:
            rejected.objectives = objectives
        rejected.note_end(FINISH_REASON_ERROR, error)
        if self._hook is not None:
            self._hook.note_end_without_token(rejected, now)
        self._action_buffer.add(request_ended(rejected, now))


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
            live, lambda candidate: self._queue.held_ahead_seconds(live, candidate, objectives.ttft_due), due, now
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
