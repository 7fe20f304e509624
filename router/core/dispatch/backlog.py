"""Tells when a shard gets more of what waits for it in the router."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from kvloom_common.class_rank import INTERACTIVE_RANK
from router.core.dispatch.waiting_queues import WaitingQueues
from router.core.fleet.fleet import Shard
from router.core.live import LiveRequest, QueueId
from router.core.load.load_ledger import LoadLedger
from router.core.load.load_view import LoadView
from router.core.placement.policy import BacklogPolicy, Candidate

MAX_PASSED_SECONDS: Final = 5.0
"""How long a request that waits for KV blocks is passed by smaller ones."""
MIN_TICK_SECONDS: Final = 0.001
"""An estimate that repeatedly returns `now` must not make time stand still."""

_NO_BACKLOG: Final = BacklogPolicy(math.inf, math.inf, backlog_tokens=2**63, aging=0.0)


class Backlogs:
    """Compares the prefill that shards have been sent with what the policy lets them have."""

    def __init__(self, ledger: LoadLedger, queues: WaitingQueues, policy: BacklogPolicy | None) -> None:
        """Without a policy, a shard with room is open."""
        self._ledger = ledger
        self._queues = queues
        self._policy = policy or _NO_BACKLOG

    def is_open(self, shard: Shard, class_rank: int, now: float) -> bool:
        """True when the shard gets more of that rank, or of more urgent ones. Prefill that gives way to it at the next
        step does not count."""
        view = self._ledger.view(shard.shard_id)
        if view.num_queued_prefill_tokens <= self._policy.backlog_tokens:
            return shard.has_room
        if view.ranked_work:
            yielding_seconds, num_yielding_tokens = view.yielding(class_rank, now)
            if view.num_queued_prefill_tokens - num_yielding_tokens <= self._policy.backlog_tokens:
                return shard.has_room
            return shard.has_room and view.queue_seconds(now) - yielding_seconds <= self._backlog_seconds(view)
        return shard.has_room and view.queue_seconds(now) <= self._backlog_seconds(view)

    def opens_for(self, shard: Shard, live: LiveRequest, now: float) -> bool:
        """True when a shard that is open for the most urgent request in its queue is for this one too."""
        return not self._ledger.view(shard.shard_id).ranked_work or self.is_open(shard, live.priority_class.rank, now)

    def is_open_for_first(self, shard: Shard, now: float) -> bool:
        """True when the shard gets more of the most urgent rank that waits for it; if nothing does, of interactive
        requests."""
        if not self._ledger.view(shard.shard_id).ranked_work:
            return self.is_open(shard, INTERACTIVE_RANK, now)
        waiting = self._queues.queue(shard.queue_id)
        return self.is_open(shard, min((live.priority_class.rank for live in waiting), default=INTERACTIVE_RANK), now)

    def _backlog_seconds(self, view: LoadView) -> float:
        is_shared = view.foreign_running or view.foreign_waiting
        return self._policy.shared_backlog_seconds if is_shared else self._policy.backlog_seconds

    def opens_in(self, shard: Shard, now: float) -> float:
        """In how many seconds the shard gets more of what waits for it; infinity: not before an event."""
        view = self._ledger.view(shard.shard_id)
        wait_seconds = view.queue_seconds(now) - self._backlog_seconds(view)
        if view.ranked_work:
            waiting = self._queues.queue(shard.queue_id)
            ranks = [live.priority_class.rank for live in waiting if live.prefill_chunk is None]
            if not ranks:
                return math.inf
            wait_seconds -= view.yielding(min(ranks), now)[0]
        if wait_seconds <= 0 or view.num_queued_prefill_tokens <= self._policy.backlog_tokens:
            return math.inf
        return max(wait_seconds, MIN_TICK_SECONDS)

    def can_hold(self, shard: Shard, candidate: Candidate) -> bool:
        """Returns true if the shard has KV blocks for a request that would be sent now."""
        return self._ledger.view(shard.shard_id).can_hold(candidate.num_needed_blocks)

    def fits_now(self, queue_id: QueueId, now: float) -> Callable[[LiveRequest], bool]:
        """Returns a check that the shard has KV blocks for a request that waits for it. In an engine's queue it would
        make all later ones wait; here those that fit pass it, but only for some seconds, or a large one would never
        find room."""
        view = self._ledger.view(queue_id.shard_id)
        num_free = view.num_free_blocks
        if view.held.num_blocks <= num_free:
            return lambda _: True  # as nearly always
        held = view.held
        patient_since = min(
            (
                live.arrived_at
                for live in self._queues.queue(queue_id)
                if now - live.arrived_at > MAX_PASSED_SECONDS
                and not view.can_hold(held[live.request.request_id].num_needed_blocks)
            ),
            default=math.inf,
        )
        return lambda live: (
            live.arrived_at <= patient_since and view.can_hold(held[live.request.request_id].num_needed_blocks)
        )
