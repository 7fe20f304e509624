"""Decides when requests that are not urgent, and wait unplaced, may be placed although more urgent ones wait."""

from __future__ import annotations

from typing import Final

from router.core.dispatch.waiting_queues import WaitingQueues
from router.core.fleet.fleet import Fleet, Shard
from router.core.live import QueueId
from router.core.load.load_ledger import LoadLedger

MAX_FILLED_UTILISATION: Final = 0.5
"""A shard beyond this utilisation gets no less urgent requests while more urgent ones wait for other shards: they would
slow down the decoding of those (docs/concepts/class-placement.md)."""


class ParkingRules:
    """Looks at what waits and at what shards have to do. `lets_wait`: the policy keeps a backlog in the router."""

    def __init__(self, fleet: Fleet, ledger: LoadLedger, queues: WaitingQueues, *, lets_wait: bool) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._queues = queues
        self._lets_wait = lets_wait

    def may_go(self, queue_id: QueueId, rank: int, now: float) -> bool:
        model, queues = queue_id.model, self._queues
        shards = self._fleet.ready(model)
        if queues.num_waiting(model, rank - 1) and not any(self._may_fill(shard, now) for shard in shards):
            return False
        return self._may_place_more(model, len(shards)) and any(shard.has_room for shard in shards)

    def _may_place_more(self, model: str, num_shards: int) -> bool:
        """True when fewer requests than shards are placed and not sent. Those that no shard can run any more are not
        placed: they would keep the parked ones waiting beside an idle shard."""
        queues = self._queues
        num_placed = queues.num_waiting(model) - sum(
            queues.num_in(other) for other in queues.queue_ids if other.is_parked and other.model == model
        )
        if num_placed < num_shards:
            return True
        num_stuck = sum(live.unschedulable_at is not None for live in queues.queue(QueueId(model)))
        return num_placed - num_stuck < num_shards

    def _may_fill(self, shard: Shard, now: float) -> bool:
        """True when the shard has little prefill and none at present, although more urgent requests wait for others.
        What fills it gives way at the next step."""
        model, view = shard.description.model, self._ledger.view(shard.shard_id)
        return (
            self._lets_wait
            and view.yield_tokens > 0
            and not view.num_queued_prefill_tokens
            and view.busy.per_second(now) < MAX_FILLED_UTILISATION
            and shard.has_room
            and shard.queue_id not in self._queues
            and QueueId(model) not in self._queues
        )
