"""Bugs that the simulation found in the core, planted again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvloom_common.discovery.registry import HEARTBEAT_SECONDS
from kvloom_common.models.model_routes import ModelRoutes
from lab.dst.checkers import (
    DeadlinesKept,
    EndsJustified,
    IndexExact,
    PlacementsFit,
    RecordsFollowed,
    RolloutsHarmless,
    SessionsMoveOnce,
    UnloadsHarmless,
)
from lab.dst.rollouts import edge
from router.core.action_buffer import ActionBuffer
from router.core.admission.arrivals import Arrivals
from router.core.core import RouterCore
from router.core.dispatch.dispatch_queue import DispatchQueue
from router.core.events import Tick
from router.core.live import Attempt, LiveRequest
from router.core.prefix_index.event_order import EventOrder
from router.links.fleet_links import LinkTarget
from tests.lab.dst.planted_bugs.registry import Patch, caught_by
from tools.supervisor.models.idle_watch import IdleWatch, ShardWork
from tools.supervisor.rollout.announcement import RolloutAnnouncement


@caught_by(None, "never_fails")
def tells_attempts_apart_by_their_numbers(patch: Patch) -> None:
    """A request id is used again while its cancelled attempt still holds a reservation: both attempts have the number
    1."""
    patch.setattr(Attempt, "key", property(lambda self: (self.request_id, self.attempt_id)))


@caught_by(EndsJustified)
def takes_a_queue_place_without_need(patch: Patch) -> None:
    """A resumed request that is at its limit evicts another one from the full queue, or is refused."""
    original = Arrivals.on_request

    def on_request(self: Arrivals, event: Any, now: float) -> None:
        request = event.request
        if self.refusal(request) is None and request.request_id not in self._lifecycle.requests:
            live = LiveRequest(request, self._lifecycle.client(request.client_id), now)
            if not self._placer.eligibility.can_run(live):
                self._make_queue_place(live, now)
        original(self, event, now)

    patch.setattr(Arrivals, "on_request", on_request)


@caught_by(IndexExact)
def takes_a_new_gap_for_the_old_one(patch: Patch) -> None:
    """For some seconds after a snapshot was asked for, no other is asked for, although the first has arrived."""
    original = EventOrder.skip_to

    def skip_to(self: EventOrder, snapshot_number: int) -> bool:
        asked_at = self._asked_at
        is_news = original(self, snapshot_number)
        self._asked_at = asked_at
        return is_news

    patch.setattr(EventOrder, "skip_to", skip_to)


@caught_by(DeadlinesKept)
def sends_requests_past_their_deadline(patch: Patch) -> None:
    """Deadlines are checked by ticks only, which come late to a router that was suspended."""
    original = RouterCore._expire

    def expire(self: RouterCore, now: float) -> None:
        if isinstance(self.event, Tick):
            original(self, now)

    original_handle = RouterCore.handle

    def handle(self: RouterCore, event: Any, now: float) -> Any:
        self.event = event
        return original_handle(self, event, now)

    patch.setattr(RouterCore, "event", None, raising=False)
    patch.setattr(RouterCore, "handle", handle)
    patch.setattr(RouterCore, "_expire", expire)


@caught_by(RecordsFollowed, max_seeds=20, first_seed=370)
def drops_a_shard_that_restarted_while_redis_was_away(patch: Patch) -> None:
    """A shard that was reached under its old record, because the registry could not be read, is disconnected when its
    new record can be."""
    patch.setattr(LinkTarget, "accept", lambda _self, _incarnation_id: None)


@caught_by(PlacementsFit, max_seeds=20, first_seed=5510)
def keeps_waiting_for_a_suspected_shard(patch: Patch) -> None:
    """A request that waits for a suspected shard, because there was no other, keeps waiting when there is one."""
    patch.setattr(DispatchQueue, "leave_last_resorts", lambda _self, _now: None)


@caught_by(SessionsMoveOnce, first_seed=110)
def brings_a_forgotten_rollout_back(patch: Patch) -> None:
    """A supervisor that was suspended continues its rollout, although all edges have gone back to the old version."""

    async def renew(self: RolloutAnnouncement) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)  # sleep: of the simulation's clock
            await self._registry.announce(self._record)
            self._renewed_at = asyncio.get_running_loop().time()

    patch.setattr(RolloutAnnouncement, "_renew", renew)


@caught_by(RolloutsHarmless, first_seed=101600, is_rare=True)
def refuses_what_comes_with_a_withdrawal(patch: Patch) -> None:
    """A request that an edge without the registry sends before it hears that the old version has been withdrawn, which
    the router knows already, gets 404 although the new version is there."""
    patch.setattr(edge, "fallback_models", lambda _passed, _models: iter(()))


@caught_by(RolloutsHarmless, first_seed=580)
def leaves_the_names_to_a_withdrawn_version(patch: Patch) -> None:
    """An edge that has forgotten the rollout, as it cannot reach the registry, sends requests to the old version while
    that is unloaded, and they are refused."""
    patch.setattr(ModelRoutes, "follow_successors", lambda _self, _successors: None)
    refuses_what_comes_with_a_withdrawal(patch)


@caught_by(UnloadsHarmless, first_seed=120, is_rare=True)
def overlooks_what_comes_and_goes_between_polls(patch: Patch) -> None:
    """A model counts as idle if nothing runs at the moment of a poll. A prompt is prefilled in chunks, between which
    nothing does."""
    original = IdleWatch.take

    def take(self: IdleWatch, works: Sequence[ShardWork | None]) -> None:
        original(self, [None if work is None else work._replace(num_submitted=0) for work in works])

    patch.setattr(IdleWatch, "take", take)


@caught_by(EndsJustified, first_seed=1030, is_rare=True)
def cancels_what_took_the_place_of_a_lost_sequence(patch: Patch) -> None:
    """An event ends a request and replaces its shard by another process: the cancellation reaches that one, where the
    slot belongs to another request."""
    patch.setattr(ActionBuffer, "drop_cancels", lambda _self, _shard_id: None)
