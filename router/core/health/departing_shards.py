"""Empties shards that have notice that they end: a cloud takes their machine away, or they are scaled in."""

from __future__ import annotations

import math
from typing import Final

from router.core.action_buffer import ActionBuffer
from router.core.actions import MoveReason, RequestsMoved
from router.core.fleet.departure import Departure, RunningWork, in_order_of_leaving
from router.core.fleet.fleet import Fleet, Shard
from router.core.health.migrator import Migrator
from router.core.live import LiveRequest
from router.core.load.load_ledger import LoadLedger

CHECK_SECONDS: Final = 0.05
"""How often it is checked whether there is room for what could not move, or whether what was to end in time does."""
TURN_SECONDS: Final = 0.01
"""Moves that are due within this time are made together."""
MIN_PREFILL_SECONDS: Final = 1e-6


class DepartingShards:
    def __init__(self, fleet: Fleet, ledger: LoadLedger, migrator: Migrator, action_buffer: ActionBuffer) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._migrator = migrator
        self._action_buffer = action_buffer
        self.num_departing = 0
        """How many shards have notice."""

    def on_load(self, shard: Shard, empty_within_seconds: float | None, now: float) -> None:
        """A report came, with the time in which the shard has to be empty; None: it need not be."""
        known = shard.departure
        if empty_within_seconds is None:
            if known is not None:
                shard.departure = None
                self.num_departing -= 1
        elif known is None or not known.is_at(now + empty_within_seconds):
            self.num_departing += known is None
            shard.departure = Departure.within(empty_within_seconds, now)
            self._move_due(shard, shard.departure, now)

    def on_shard_down(self, shard: Shard) -> None:
        self.num_departing -= shard.departure is not None

    def next_deadline(self) -> float:
        """When `on_tick` has to move something; infinity: not before another event."""
        departing = (s for s in self._fleet.shards.values() if s.departure is not None and s.choices)
        return min((s.departure.next_move_at for s in departing if s.departure is not None), default=math.inf)

    def on_tick(self, now: float) -> None:
        if not self.num_departing:
            return
        for shard in list(self._fleet.shards.values()):
            departure = shard.departure
            if departure is not None and shard.choices and departure.next_move_at <= now:
                self._move_due(shard, departure, now)

    def _move_due(self, shard: Shard, departure: Departure, now: float) -> None:
        """Move what is due. What cannot move now is tried again, since it is better off there than nowhere."""
        shard.fast_path.write_back()
        requests = {choice.request.request.request_id: choice.request for choice in shard.choices.values()}
        step_seconds = self._ledger.view(shard.shard_id).report.decode_step_seconds
        works = [self._work(live, shard) for live in requests.values()]
        leaving = in_order_of_leaving(works, step_seconds, departure.move_by - now)
        total_seconds = sum(work.prefill_seconds for work in leaving)
        num_moved, wait_seconds, moved_seconds = 0, 0.0, 0.0
        for work in leaving:
            if self._migrator.move(requests[work.request_id], shard, now, is_noticed=True):
                num_moved += 1
                moved_seconds += work.prefill_seconds
                wait_seconds = departure.seconds_until_next(moved_seconds, total_seconds, now)
                if wait_seconds > TURN_SECONDS:
                    break
        if num_moved:
            self._action_buffer.add(RequestsMoved(shard.shard_id, num_moved, MoveReason.NOTICE))
        if wait_seconds <= TURN_SECONDS:
            wait_seconds = CHECK_SECONDS
        departure.next_move_at = now + wait_seconds

    def _work(self, live: LiveRequest, shard: Shard) -> RunningWork:
        choices = [choice for choice in live.choices if choice.shard_id == shard.shard_id]
        view = self._ledger.view(shard.shard_id)
        num_prompt_tokens = len(live.request.prompt_token_ids)
        num_output_tokens = [len(choice.output_token_ids) for choice in choices]
        num_context_tokens = num_prompt_tokens + sum(num_output_tokens)
        prefill_seconds = view.speed.request_seconds(num_context_tokens, 0, 0)
        return RunningWork(
            live.request.request_id,
            has_started=all(shard.attempts[choice.shard_slot].key in view.running for choice in choices),
            num_remaining_tokens=max(
                max(0, (choice.max_tokens or 0) - count)
                for choice, count in zip(choices, num_output_tokens, strict=True)
            ),
            num_context_tokens=num_context_tokens,
            prefill_seconds=max(prefill_seconds, MIN_PREFILL_SECONDS),
        )
