"""How soon requests begin that would arrive now, for edges that choose among cells (docs/operate/regions.md)."""

from __future__ import annotations

from typing import NamedTuple

from kvloom_common.class_rank import INTERACTIVE_RANK
from router.core.dispatch.dispatch_queue import DispatchQueue
from router.core.dispatch.overload import MIN_REQUESTS_PER_SECOND, OverloadGuard
from router.core.fleet.fleet import Fleet
from router.core.load.load_ledger import LoadLedger


class StartEstimate(NamedTuple):
    """Says what an interactive request for a model would find that arrives now."""

    wait_seconds: float
    """The time until its prefill begins."""
    seconds_each: float
    """How much longer the next one waits for each that arrives before it; 0: not known."""
    prefill_tokens_per_second: float
    """The speed of one shard; 0: not known."""


class Starts:
    """Pure, like all of the core. It changes nothing."""

    def __init__(self, fleet: Fleet, ledger: LoadLedger, queue: DispatchQueue, overload: OverloadGuard) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._queue = queue
        self._overload = overload

    def of(self, model: str, now: float) -> StartEstimate | None:
        """None: no shard accepts requests for the model."""
        views = [self._ledger.view(shard.shard_id) for shard in self._fleet.ready_shards(model).preferred]
        if not views:
            return None
        wait_seconds = min(view.queue_seconds(now) + view.held.seconds for view in views)
        seconds_per_token = min(view.speed.seconds_per_token for view in views)
        requests_per_second, prefill_seconds = self._overload.measured(model)
        each = prefill_seconds / len(views)
        num_waiting = self._queue.queues.num_waiting(model, INTERACTIVE_RANK)
        if num_waiting and self._queue.is_busy(model):
            if requests_per_second is not None:
                each = 1.0 / max(requests_per_second, MIN_REQUESTS_PER_SECOND)
            wait_seconds = max(wait_seconds, (num_waiting + 1) * each)
        return StartEstimate(wait_seconds, each, 1.0 / seconds_per_token if seconds_per_token > 0.0 else 0.0)
