"""Planted bugs in the handling of overload, outages and drains."""

from __future__ import annotations

from typing import Any

from kvloom.v1.generation_pb2 import FinishReason
from lab.dst.checkers import (
    BrownoutAtAdmission,
    DrainedShardsEmpty,
    DrainsEnd,
    NoRefusalBesideIdle,
    OutagePatience,
    PlacementsFit,
    RejectionsJustified,
    TiersKept,
)
from router.core.admission.arrivals import Arrivals
from router.core.admission.outage import Outage
from router.core.core import RouterCore
from router.core.dispatch.dispatch_queue import DispatchQueue
from router.core.dispatch.overload import OverloadGuard
from router.core.dispatch.refusals import draining
from router.core.dispatch.waiting_queues import WaitingQueues
from router.core.events import DrainEnded, Request
from router.core.fleet.fleet import Shard
from router.core.health.health_watch import HealthWatch
from router.core.live import LiveRequest, QueueId
from router.core.priority_classes import BATCH
from tests.lab.dst.planted_bugs.registry import Patch, caught_by


@caught_by(RejectionsJustified)
def counts_decode_time_as_queue_time(patch: Patch) -> None:
    """The duration of an answer counts against a new request as if it were queue time."""
    original = OverloadGuard.refusal

    def refusal(self: OverloadGuard, request: Request, timeout_seconds: float, now: float) -> Any:
        if self._config.sheds_load_early:
            wait_seconds = self._model(request.model).service_seconds(request.max_tokens)
            if wait_seconds > self._max_queue_seconds:
                return self.full(request, now)
        return original(self, request, timeout_seconds, now)

    patch.setattr(OverloadGuard, "refusal", refusal)


@caught_by(BrownoutAtAdmission, max_seeds=8, first_seed=12)
def forgets_the_cap_on_another_shard(patch: Patch) -> None:
    """An answer that was capped at its admission has all the tokens it asked for when it continues elsewhere."""
    original = LiveRequest.capped

    def capped(self: LiveRequest, max_tokens: float) -> float:
        return max_tokens if self.num_attempts else original(self, max_tokens)

    patch.setattr(LiveRequest, "capped", capped)


@caught_by(BrownoutAtAdmission, first_seed=80)
def degrades_answers_that_continue(patch: Patch) -> None:
    """An answer that another router has begun is shortened by the brownout of this one."""
    patch.setattr(Request, "is_continued", property(lambda _request: False))


@caught_by(TiersKept)
def serves_all_tiers_alike(patch: Patch) -> None:
    """Batch requests wait in the same queue as interactive ones, in the order in which they came."""
    patch.setattr(DispatchQueue, "park", lambda self, live, now: self.wait_for_any(live, now))

    def in_order(self: WaitingQueues, queue_id: QueueId, _now: float) -> Any:
        queue = self._queues.get(queue_id)
        return () if queue is None else queue.flows.values()

    patch.setattr(WaitingQueues, "_in_order", in_order)


@caught_by(TiersKept)
def takes_places_from_tenants_only(patch: Patch) -> None:
    """In a full queue, a request whose tenant has its share is refused, although a batch request could be evicted."""
    original = WaitingQueues.take_victim

    def take_victim(self: WaitingQueues, tenant: str, _rank: int) -> Any:
        return original(self, tenant, BATCH.rank)

    patch.setattr(WaitingQueues, "take_victim", take_victim)


@caught_by(OutagePatience)
def gives_up_at_once(patch: Patch) -> None:
    """The patience with outages is forgotten."""
    original = Outage.find_unschedulable

    def find_unschedulable(self: Outage, now: float) -> None:
        self._patience_seconds = self._start_patience_seconds = 0.0
        original(self, now)

    patch.setattr(Outage, "find_unschedulable", find_unschedulable)


@caught_by(OutagePatience)
def waits_for_ever(patch: Patch) -> None:
    """Requests are not notified that there will be no shard."""
    patch.setattr(Outage, "expire", lambda _self, _now: None)


@caught_by(OutagePatience)
def refuses_what_may_wait_for_a_start(patch: Patch) -> None:
    """A model whose last shard has left takes no requests, although they may wait for another one."""
    original = Arrivals.refusal
    patch.setattr(Arrivals, "refusal", lambda self, request, **_may_wait: original(self, request))


@caught_by(PlacementsFit)
def floods_a_returning_shard(patch: Patch) -> None:
    """A shard that returns while many requests wait is sent as much as any other."""

    patch.setattr(Shard, "limit", property(lambda shard: 2 * shard.description.max_batch, lambda _shard, _limit: None))


@caught_by(DrainedShardsEmpty)
def lets_drains_take_for_ever(patch: Patch) -> None:
    """The end of a drain is ignored."""
    original = HealthWatch.on_load

    def on_load(self: HealthWatch, shard: Shard, *, hands_over: bool, now: float) -> None:
        original(self, shard, hands_over=False, now=now)

    patch.setattr(HealthWatch, "on_load", on_load)


@caught_by(DrainsEnd)
def ends_one_request_of_a_drain(patch: Patch) -> None:
    """Only the first request is ended when the drain ends."""

    def on_drain_ended(self: RouterCore, _event: DrainEnded, now: float) -> None:
        for name, live in list(self._lifecycle.requests.items())[:1]:
            self._lifecycle.end_request(live, FinishReason.FINISH_REASON_ERROR, draining(name), now)

    patch.setattr(RouterCore, "_on_drain_ended", on_drain_ended)


@caught_by(NoRefusalBesideIdle)
def refuses_beside_an_idle_shard(patch: Patch) -> None:
    """The wait that is predicted from the requests which wait for one shard holds for all of them."""
    patch.setattr(DispatchQueue, "is_busy", lambda *_: True)
    patch.setattr(DispatchQueue, "go_to_idle", lambda *_: False)
