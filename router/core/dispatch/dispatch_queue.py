"""The requests that wait in the router, and the time at which each one is sent to its shard.

A policy may ask that a shard be sent no more prefill than keeps it busy for a moment. Requests placed beyond that wait
here, in the shard's queue, where they can still be overtaken by shorter prefills, move to a shard that becomes free, or
be cancelled at no cost. An engine's own queue is first come, first served, and final.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol

from router.core.dispatch.backlog import Backlogs
from router.core.dispatch.fair_shares import MIN_COMPETING_TOKENS, FairShares, Preemption
from router.core.dispatch.idle_bound import REPLACE_SECONDS
from router.core.dispatch.openings import Openings
from router.core.dispatch.parking import ParkingRules
from router.core.dispatch.prefill_chunks import PrefillChunkSettings, next_prefill_chunk, rest_seconds
from router.core.dispatch.replacement import Replacements
from router.core.dispatch.service_counters import ServiceCounters
from router.core.dispatch.ttft_order import ttft_order
from router.core.dispatch.waiting_queues import WaitingQueues, flow_of
from router.core.fleet.fleet import Fleet, Shard
from router.core.live import LiveRequest, QueueId
from router.core.load.load_ledger import LoadLedger
from router.core.load.load_view import LoadView, QueuedPlacement
from router.core.placement.placer import Placer
from router.core.placement.policy import Candidate
from router.core.placement.predict import predict

MAX_REPLACED: Final = 64
"""The most requests of a model that are placed again at a time."""


class AttemptTarget(Protocol):
    """The methods of AttemptSender that the queue calls; the sender owns the queue, so it cannot be imported here."""

    def send(self, live: LiveRequest, shard: Shard, candidate: Candidate, now: float) -> None:
        """Dispatch the request now."""

    def send_prefill_chunk(
        self, live: LiveRequest, shard: Shard, candidate: Candidate, num_tokens: int, now: float
    ) -> None:
        """Have the shard compute the first `num_tokens` tokens of its prompt."""

    def cancel_prefill_chunk(self, live: LiveRequest, shard_id: str) -> None:
        """The request will not be sent to that shard."""

    def begin_prefill_leg(self, live: LiveRequest, candidate: Candidate, now: float) -> bool:
        """Have another shard compute its prompt, if that is worth it; returns whether it is."""
        ...


class DispatchQueue:
    """Places requests, keeps those that cannot be sent yet, and sends them when their shard opens."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: LoadLedger,
        placer: Placer,
        sender: AttemptTarget,
        prefill_chunks: PrefillChunkSettings | None,
        fair_shares: FairShares,
        service: ServiceCounters,
    ) -> None:
        self.queues = WaitingQueues(service)
        self.check_unschedulable = False
        """The fleet may have changed: look for requests that no shard can serve."""
        self._fleet = fleet
        self._ledger = ledger
        self._placer = placer
        self._eligibility = placer.eligibility
        self._sender = sender
        self._prefill_chunks = prefill_chunks
        self._fair_shares = fair_shares
        self._service = service
        self._hold = placer.hold
        self._backlogs = Backlogs(ledger, self.queues, placer.hold)
        self._parking = ParkingRules(fleet, ledger, self.queues, lets_wait=placer.hold is not None)
        self._replacements = Replacements(fleet, ledger, placer, self.queues, self._backlogs, fair_shares)
        self._dirty_shards: dict[str, None] = {}
        """Shards that may have room since `serve` last ran, or since a request began to wait where none did."""
        self._openings = Openings()
        self._replace_at: dict[str, float] = {}
        """Models with requests in queues of shards → when these are placed again."""

    def __len__(self) -> int:
        return len(self.queues)

    def enter(self, live: LiveRequest, now: float) -> None:
        """Place the request: it is sent at once, or waits for its shard, or for any shard."""
        self.place(live, self._eligibility.open_shards(live), now)

    def place(self, live: LiveRequest, open_shards: list[Shard], now: float) -> None:
        """Like `enter`, for a caller that knows the shards which could run the request and have room."""
        if not open_shards:
            self.wait_for_any(live, now)
            return
        shard, candidate = self._placer.pick(open_shards, live, now)
        if live.prediction is None:
            live.prediction = predict(self._ledger.view(shard.shard_id), candidate, now - live.arrived_at)
        if self._fleet.has_prefill_shards and self._sender.begin_prefill_leg(live, candidate, now):
            return
        self._settle(live, shard, candidate, now)

    def must_park(self, live: LiveRequest, now: float) -> bool:
        """True when a request that is not urgent has to wait although a shard could take it: more urgent ones that
        could run there arrived before, or enough of its class are placed already."""
        model = live.request.model
        if not self.queues.num_waiting(model):
            return False
        parked = _parked(live)
        rank = live.priority_class.rank
        return not self._parking.may_go(parked, rank, now) or any(
            map(self._eligibility.can_run, self.queues.queue(parked))
        )

    def park(self, live: LiveRequest, now: float) -> None:
        """Leave the request unplaced while more urgent ones wait."""
        self._push(live, _parked(live), now)
        self._fair_shares.note_parked(live, now)

    def wait_for_any(self, live: LiveRequest, now: float) -> None:
        """No shard has room for the request, or it has left the one where it was; `serve` will place it. One that had
        to give way to a more urgent class is parked, or it would be sent back at once."""
        self._push(live, _parked(live) if live.is_displaced else QueueId(live.request.model), now)
        self._fair_shares.note_waiting(live, now)

    def _push(self, live: LiveRequest, queue_id: QueueId, now: float) -> None:
        if self._service.has_rivals(live):
            self._count_service(queue_id.model, now)
        self.queues.push(live, queue_id)

    def _count_service(self, model: str, now: float) -> None:
        """Count what running answers have had, because the order of tenants depends on it now."""
        self._service.settle_shards(model, self._fleet.ready(model), now)

    def leave(self, live: LiveRequest) -> None:
        """The request stops waiting. If it waits again later, its patience begins anew."""
        live.unschedulable_at = None
        self._take_out(live)

    def _take_out(self, live: LiveRequest) -> None:
        queue_id = live.queue_id
        assert queue_id is not None
        self.queues.remove(live)
        if queue_id.shard_id:
            self._sender.cancel_prefill_chunk(live, queue_id.shard_id)
            self._ledger.view(queue_id.shard_id).held.pop(live.request.request_id)

    def mark_dirty(self, shard_id: str) -> None:
        """The shard has less to do than before."""
        self._dirty_shards[shard_id] = None

    def requeue_all(self, shard: Shard, now: float) -> None:
        """The shard takes nothing more: requests in its queue will be placed again."""
        queue_id = shard.queue_id
        for live in list(self.queues.queue(queue_id)):
            self._take_out(live)
            self.wait_for_any(live, now)
        self._openings.discard(shard.shard_id)

    def leave_last_resorts(self, now: float) -> None:
        """Requests that wait for a shard that is suspected, or only computes prompts, since there was no other, are
        placed again if there is one now."""
        for queue_id in self.queues.queue_ids:
            shard = self._fleet.shards.get(queue_id.shard_id)
            if shard is None or not (shard.is_suspected or shard.is_for_prompts):
                continue
            resort = _resort(shard)
            if any(_resort(other) < resort for other in self._fleet.ready(queue_id.model)):
                self.requeue_all(shard, now)

    def unschedulable(self) -> list[LiveRequest]:
        """Requests that wait although no ready shard could ever run them."""
        return [live for live in self.queues if not self._eligibility.eligible(live)]

    def engine_wait_seconds(self, model: str, now: float) -> float:
        """How long a request that is sent now waits in the engine of the least loaded shard. Almost nothing under a
        policy that lets requests wait here."""
        if self._hold is not None:
            return 0.0
        views = [self._ledger.view(shard.shard_id) for shard in self._fleet.ready(model)]
        return min((view.queue_seconds(now) for view in views), default=0.0)

    def has_shard(self, model: str) -> bool:
        """Returns true if a shard accepts requests for the model."""
        return bool(self._fleet.ready(model))

    def is_busy(self, model: str) -> bool:
        """Returns true if all shards that serve the model, of which there are some, have something to do. Suspected
        ones count only if all are: then requests are placed there, too."""
        idle, shards = self._ledger.idle(), self._fleet.ready_shards(model).preferred
        return bool(shards) and not any(shard.shard_id in idle for shard in shards)

    def held_ahead_seconds(self, live: LiveRequest, candidate: Candidate, ttft_due: float) -> float:
        """Prefill time of the requests that wait in the router for that shard and go before one that is to have its
        first token by `ttft_due`: of its own tenant and class those with an earlier one, of others the shorter ones."""
        flow, own_seconds = flow_of(live), candidate.own_seconds
        return sum(
            other.own_seconds
            for other in self.queues.queue(QueueId(live.request.model, candidate.shard_id))
            if (
                other.objectives is not None and other.objectives.ttft_due <= ttft_due
                if flow_of(other) == flow
                else other.own_seconds <= own_seconds
            )
        )

    def next_deadline(self) -> float:
        """When `serve` has to run at the latest; infinity: not before another event."""
        at = self._fair_shares.next_deadline()
        return min(at, self._next_due()) if self.queues.num_requests else at

    def _next_due(self) -> float:
        """When a shard is expected to open, or requests are placed again; infinity: not before an event."""
        at = self._openings.next()
        return min(at, *self._replace_at.values()) if self._replace_at else at

    def can_make_room(self, model: str, tenant: str) -> bool:
        """True when a request of the tenant would be served soon, whatever waits."""
        return self._fair_shares.can_make_room(model, tenant, self.queues)

    def preemptions(self, now: float) -> list[Preemption]:
        """The sequences that have to give way to other tenants, to be removed from their shards before `serve`."""
        for model in self._fair_shares.end_contention(self.queues, now):
            self._dirty_shards.update((shard.shard_id, None) for shard in self._fleet.ready(model))
        return self._fair_shares.preemptions(self.queues, now)

    def serve(self, now: float) -> None:
        """Send every waiting request that can be sent."""
        self._fair_shares.begin_serving(now)
        if not (self._dirty_shards or self.queues.without_shard) and now < self._next_due():
            self._fair_shares.end_serving()
            return  # as after most events: no shard has less to do, and nothing is due
        num_before = math.inf
        while self.queues.num_requests < num_before:
            num_before = self.queues.num_requests
            self._serve_once(now)
            if not self._fair_shares.has_floors:
                break  # what was sent has left no room to others
        self._fair_shares.end_serving()

    def _serve_once(self, now: float) -> None:
        if not self.queues.without_shard and self._hold is not None:
            self._serve_shards(now)
            return
        parked = [queue_id for queue_id in self.queues.without_shard if queue_id.is_parked]
        for queue_id in parked:
            self._place_aged(queue_id, now)
        self._serve_models(now)
        if self._hold is not None:
            self._serve_shards(now)
        for queue_id in sorted(filter(self.queues.__contains__, parked), key=self.queues.rank_of):
            self._serve_parked(queue_id, now)

    def _serve_shards(self, now: float) -> None:
        for model in [model for model, at in self._replace_at.items() if at <= now]:
            self._place_again(model, now)
        for shard_id in list(dict.fromkeys(self._openings.take_due(now)) | self._dirty_shards):
            shard = self._fleet.shards.get(shard_id)
            if shard is not None and not shard.is_draining:
                self._serve_shard(shard, now)
        self._dirty_shards.clear()

    # -- queues of models ------------------------------------------------------------------------------------------

    def _serve_models(self, now: float) -> None:
        for queue_id in [queue_id for queue_id in self.queues.without_shard if not queue_id.is_parked]:
            while any(shard.has_room for shard in self._fleet.ready(queue_id.model)):
                live = self._take_for_any(queue_id, now)
                if live is None:
                    break
                self.enter(live, now)

    def _serve_parked(self, queue_id: QueueId, now: float) -> None:
        """Place requests that are not urgent, while no urgent one waits, and few at a time: a request in a shard's
        queue precedes one that arrives later."""
        while queue_id in self.queues and self._parking.may_go(queue_id, self.queues.rank_of(queue_id), now):
            live = self._take_for_any(queue_id, now)
            if live is None:
                break
            self.enter(live, now)

    def _place_aged(self, queue_id: QueueId, now: float) -> None:
        """Requests that have waited for so long that they count as urgent as any that wait are parked no longer. They
        are few at a time, because they take places that more urgent classes share with them by weight only from then
        on."""
        model, queues = queue_id.model, self.queues
        first = next(queues.queue(queue_id))
        if not first.priority_class.aging_seconds:
            return
        rank, num_shards = first.priority_class.rank, len(self._fleet.ready(model))
        while queue_id in queues and queues.num_placed(model, rank) < num_shards:
            oldest = min(queues.queue(queue_id), key=lambda live: live.arrived_at)
            is_aged = oldest.rank(now) < rank and not queues.num_waiting(model, oldest.rank(now) - 1)
            live = self._take_for_any(queue_id, now) if is_aged else None
            if live is None:
                break
            live.is_displaced = False
            self.wait_for_any(live, now)

    def _take_for_any(self, queue_id: QueueId, now: float) -> LiveRequest | None:
        """The next request that some shard can run now."""
        if self.queues.num_flows(queue_id) > 1:
            self._count_service(queue_id.model, now)
        urgency = ttft_order(lambda _: 0.0, now) if self.queues.num_with_objectives else None
        return self.queues.take(queue_id, self._eligibility.can_run, urgency, self._eligibility.any_has_room, now)

    # -- queues of shards ------------------------------------------------------------------------------------------

    def _settle(self, live: LiveRequest, shard: Shard, candidate: Candidate, now: float) -> None:
        """Send the request to the shard, now or later."""
        if self._hold is None or live.num_attempts or live.split is not None:
            # The client of a choice that has already run has begun to read, and KV waits elsewhere for a short time.
            self._sender.send(live, shard, candidate, now)
            return
        is_open = self._backlogs.is_open(shard, live.priority_class.rank, now)
        is_alone = shard.queue_id not in self.queues
        if (
            is_open
            and is_alone
            and not (candidate.memory_wait_seconds and not self._backlogs.can_hold(shard, candidate))
            and not self._fair_shares.must_defer(shard, live.request.tenant)
            and self._next_prefill_chunk(live, shard, candidate) is None
        ):
            self._sender.send(live, shard, candidate, now)
            return
        self._wait_for(live, shard, candidate, now)
        if is_open:  # those that wait are compared with the newcomer
            self._serve_shard(shard, now)

    def _wait_for(self, live: LiveRequest, shard: Shard, candidate: Candidate, now: float) -> None:
        view = self._ledger.view(shard.shard_id)
        if not self.queues.num_requests:
            self._dirty_shards.clear()  # the placement has just looked at them all
        self._push(live, shard.queue_id, now)
        self._fair_shares.note_waiting(live, now)
        live.own_seconds = candidate.own_seconds
        live.placed_at = now
        _hold(view, live, candidate.own_seconds, candidate.num_needed_blocks)
        self._note_opening(shard, now)
        self._replace_at.setdefault(shard.description.model, now + REPLACE_SECONDS)

    def _note_opening(self, shard: Shard, now: float) -> None:
        """Note when the shard's queue will have shrunk enough, if the estimate is right. A shard without room, and one
        that is open and yet gets none of what waits, is opened by an event: what has a prefill chunk there, or finds
        no blocks, or has to leave the turn to others, does not change with time alone."""
        self._openings.set(shard.shard_id, now + self._backlogs.opens_in(shard, now) if shard.has_room else math.inf)

    def _serve_shard(self, shard: Shard, now: float) -> None:
        queue_id = shard.queue_id
        while self._backlogs.is_open_for_first(shard, now):
            live = self._take(shard, queue_id, now) if queue_id in self.queues else None
            if live is None and all(map(self._turn_on(shard), self.queues.queue(queue_id))):
                live = self._replacements.stealable(shard, now)  # otherwise the shard has to finish prefill first
                if live is not None:
                    self.leave(live)
            if live is None:
                break
            self._send_some(live, shard, queue_id, now)
        if queue_id in self.queues:
            self._note_opening(shard, now)
        else:
            self._openings.discard(shard.shard_id)

    def _send_some(self, live: LiveRequest, shard: Shard, queue_id: QueueId, now: float) -> None:
        """Send the whole request, or a prefill chunk while the rest continues to wait."""
        view = self._ledger.view(shard.shard_id)
        candidate = self._placer.candidate(live, shard, now)
        num_tokens = self._next_prefill_chunk(live, shard, candidate)
        if num_tokens is None:
            self._sender.send(live, shard, candidate, now)
            return
        self._sender.send_prefill_chunk(live, shard, candidate, num_tokens, now)
        self._push(live, queue_id, now)
        live.placed_at = now
        live.own_seconds = rest_seconds(live, num_tokens, view)
        _hold(view, live, live.own_seconds, candidate.num_needed_blocks)
        self._replace_at.setdefault(shard.description.model, now + REPLACE_SECONDS)

    def _turn_on(self, shard: Shard) -> Callable[[LiveRequest], bool]:
        """Returns a function that is True when a request's tenant need not wait until the shard has finished prefill;
        each tenant is asked about once."""
        deferred: dict[str, bool] = {}

        def has_turn(live: LiveRequest) -> bool:
            tenant = live.request.tenant
            if tenant not in deferred:
                deferred[tenant] = self._fair_shares.must_defer(shard, tenant)
            return not deferred[tenant]

        return has_turn

    def _next_prefill_chunk(self, live: LiveRequest, shard: Shard, candidate: Candidate) -> int | None:
        """The number of prompt tokens to send first; None: the whole request is sent."""
        view = self._ledger.view(shard.shard_id)
        max_tokens = None
        if self._fair_shares.shared_until:
            max_tokens = self._fair_shares.max_prefill_tokens(shard, live.request.tenant)
        if max_tokens is not None:
            max_tokens = max(MIN_COMPETING_TOKENS, max_tokens - view.queued_work.num_tokens)
        return next_prefill_chunk(self._prefill_chunks, live, candidate, view, max_tokens)

    def _take(self, shard: Shard, queue_id: QueueId, now: float) -> LiveRequest | None:
        """Shortest prefill first, but waiting counts, so that no request waits for ever."""
        hold = self._hold
        assert hold is not None
        must_leave_room = self._fair_shares.must_leave_room
        if self.queues.num_flows(queue_id) > 1:
            self._count_service(queue_id.model, now)

        def shortest_first(live: LiveRequest) -> float:
            return live.own_seconds - hold.aging * (now - live.arrived_at)

        fits = self._backlogs.fits_now(queue_id, now)
        live = self.queues.take(
            queue_id,
            lambda live: (
                live.prefill_chunk is None
                and fits(live)
                and not must_leave_room(shard, live)
                and self._backlogs.opens_for(shard, live, now)
            ),
            ttft_order(shortest_first, now) if self.queues.num_with_objectives else shortest_first,
            self._turn_on(shard),
            now,
        )
        if live is not None:
            self._ledger.view(queue_id.shard_id).held.pop(live.request.request_id)
        return live

    def go_to_idle(self, live: LiveRequest, now: float) -> bool:
        """Send a request that waits for a shard to one that has nothing to do; returns false if there is none."""
        if live.queue_id is None or not live.queue_id.shard_id:
            return False
        picked = self._replacements.cheapest_idle(live, self._eligibility.open_shards(live), now)
        if picked is None:
            return False
        self.leave(live)
        self._settle(live, *picked, now)
        return True

    def _place_again(self, model: str, now: float) -> None:
        """Place again those of a model that have waited for long since their last placement, the earliest first. A
        request that stays keeps its turn."""
        before = now - REPLACE_SECONDS
        due = [
            v
            for v in self.queues
            if v.prefill_chunk is None
            and v.queue_id
            and v.queue_id.shard_id
            and v.queue_id.model == model
            and v.placed_at <= before
        ]
        due.sort(key=lambda live: live.placed_at)
        for live in due[:MAX_REPLACED]:
            if live.queue_id is None:  # an earlier one may have taken it out of its queue
                continue
            live.placed_at = now
            open_shards = self._eligibility.open_shards(live)
            shard, candidate = self._replacements.pick_again(live, open_shards, now)
            if shard.shard_id == live.queue_id.shard_id:
                shard, candidate = self._replacements.idle_instead(live, open_shards, now) or (shard, candidate)
            if shard.shard_id == live.queue_id.shard_id:
                view = self._ledger.view(shard.shard_id)
                _hold(view, live, candidate.own_seconds, candidate.num_needed_blocks)
                live.own_seconds = candidate.own_seconds
            else:
                self.leave(live)
                self._settle(live, shard, candidate, now)
        if self.queues.num_waiting(model):
            self._replace_at[model] = now + REPLACE_SECONDS
        else:
            del self._replace_at[model]


def _parked(live: LiveRequest) -> QueueId:
    """The queue of requests of its class that are not placed."""
    return QueueId(live.request.model, parked_class=live.priority_class.name)


def _hold(view: LoadView, live: LiveRequest, own_seconds: float, num_needed_blocks: int) -> None:
    """The request waits for that shard, or what it takes there is something else by now."""
    request = live.request
    view.held[request.request_id] = QueuedPlacement(
        own_seconds, live.priority_class.rank, request.tenant, live.num_context_tokens, num_needed_blocks
    )


def _resort(shard: Shard) -> tuple[bool, bool]:
    """A shard with a higher one gets requests only if there is no other."""
    return (shard.is_for_prompts, shard.is_suspected)
