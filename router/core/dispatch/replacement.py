"""Other shards for requests that wait for one: where they would be placed if they came now."""

from __future__ import annotations

from typing import Final

from router.core.dispatch.backlog import Backlogs
from router.core.dispatch.fair_shares import FairShares
from router.core.dispatch.waiting_queues import WaitingQueues
from router.core.fleet.fleet import Fleet, Shard
from router.core.live import LiveRequest
from router.core.load.load_ledger import LoadLedger
from router.core.placement.placer import Placer
from router.core.placement.policy import Candidate

MAX_STEAL_CANDIDATES: Final = 4
"""Requests of other queues that are considered when a shard runs out of work."""


class Replacements:
    """Chooses; the queue moves the request."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: LoadLedger,
        placer: Placer,
        queues: WaitingQueues,
        backlogs: Backlogs,
        fair_shares: FairShares,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._placer = placer
        self._queues = queues
        self._backlogs = backlogs
        self._fair_shares = fair_shares

    def stealable(self, shard: Shard, now: float) -> LiveRequest | None:
        """Returns a request of the longest other queue that is better off on this shard by now."""
        model = shard.description.model
        own = shard.shard_id
        views = self._ledger.views
        longest, longest_seconds = None, -1.0
        for other in self._queues.queue_ids:
            if other.shard_id and other.shard_id != own and other.model == model:
                seconds = views[other.shard_id].held.seconds
                if seconds > longest_seconds:
                    longest, longest_seconds = other, seconds
        if longest is None:
            return None
        waiting = sorted(
            (live for live in self._queues.queue(longest) if live.prefill_chunk is None),
            key=lambda live: (live.priority_class.rank, live.own_seconds),
        )
        for live in waiting[:MAX_STEAL_CANDIDATES]:
            can_go = (
                self._placer.eligibility.fits(live, shard)
                and self._placer.eligibility.has_room(shard, live)
                and self._backlogs.opens_for(shard, live, now)
                and not self._fair_shares.must_defer(shard, live.request.tenant)
            )
            if not can_go:
                continue
            picked, candidate = self.pick_again(live, [shard], now)
            if picked is shard and self._backlogs.can_hold(shard, candidate):
                return live
        return None

    def pick_again(self, live: LiveRequest, others: list[Shard], now: float) -> tuple[Shard, Candidate]:
        """The shard that the request would be placed on if it came now: the one that it waits for, or one of `others`.
        It does not queue behind itself."""
        assert live.queue_id is not None
        target = self._fleet.shards[live.queue_id.shard_id]
        held, request_id = self._ledger.view(target.shard_id).held, live.request.request_id
        own_place = held.pop(request_id)
        shards = others if target in others else [target, *others]
        picked = self._placer.pick_among(shards, live, now)
        held[request_id] = own_place
        return picked

    def idle_instead(self, live: LiveRequest, open_shards: list[Shard], now: float) -> tuple[Shard, Candidate] | None:
        """The shard with nothing to do that a request goes to which has waited for as long as its prefill takes there,
        whatever is predicted for the one that it waits for. Whoever waits no longer than the alternative takes loses
        at most as much again (ski rental), and so no prediction, however wrong, keeps it beside an idle shard."""
        picked = self.cheapest_idle(live, open_shards, now)
        if picked is None:
            return None
        is_due = now - live.arrived_at >= picked[1].own_seconds + picked[1].adapter_wait_seconds
        return picked if is_due else None

    def cheapest_idle(self, live: LiveRequest, open_shards: list[Shard], now: float) -> tuple[Shard, Candidate] | None:
        """Returns the cheapest of those shards that have nothing to do, or of some of many; None: all of them have."""
        idle_ids = self._ledger.idle()
        idle = [shard for shard in open_shards if shard.shard_id in idle_ids] if idle_ids else []
        return self._placer.pick_among(self._placer.likely(idle, live, now), live, now) if idle else None
