"""Handles the events of shards: contents of their caches, their load, and their steps' tokens, starts and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvloom.errors import protocol_violation
from router.core import events as ev
from router.core.action_buffer import ActionBuffer
from router.core.actions import WantKvSnapshot
from router.core.dispatch.attempt_sender import AttemptSender
from router.core.fleet.fleet import Fleet
from router.core.health.departing_shards import DepartingShards
from router.core.health.health_watch import HealthWatch
from router.core.load.load_ledger import LoadLedger
from router.core.prefix_index.prefix_index import PrefixIndex
from router.core.relay.relay import Relay


def check_step(event: ev.StepArrived | ev.TokensOnlyFrame) -> None:
    """Raises KvloomError (PROTOCOL_VIOLATION) for arrays that do not fit together."""
    step = event.step
    num_entries = len(step.slots)
    num_tokens = sum(step.num_tokens) if step.num_tokens else num_entries
    fits = len(step.deltas) == num_entries and len(step.token_ids) == num_tokens
    if not fits or (step.num_tokens and len(step.num_tokens) != num_entries):
        raise protocol_violation("A step frame's arrays do not fit together.")


def check_frame(event: ev.FrameArrived) -> None:
    """Raises KvloomError (PROTOCOL_VIOLATION)."""
    for part in event.parts:
        if type(part) is ev.StepArrived:
            check_step(part)


class ShardEventHandler:
    """Handles the events of connected shards; events of other shards are dropped."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        ledger: LoadLedger,
        attempt_sender: AttemptSender,
        relay: Relay,
        health: HealthWatch,
        departing: DepartingShards,
        action_buffer: ActionBuffer,
        *,
        serve_queue: Callable[[float], None],
        note_fleet_change: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._ledger = ledger
        self._queue = attempt_sender.queue
        self._relay = relay
        self._health = health
        self._departing = departing
        self._action_buffer = action_buffer
        self._serve_queue = serve_queue
        self._note_fleet_change = note_fleet_change
        parts: dict[type, Callable[[Any, float], None]] = {
            ev.StepArrived: self._on_step,
            ev.KvEventsArrived: self._on_kv_events,
            ev.KvSnapshotArrived: self._on_kv_snapshot,
            ev.LoadReported: self._on_load,
            ev.AdaptersReported: self._on_adapters,
        }
        self._parts = parts
        self.handlers = {**parts, ev.FrameArrived: self._on_frame, ev.TokensOnlyFrame: self._on_tokens_only_frame}

    def handle_part(self, part: ev.KvEventsArrived | ev.LoadReported, now: float) -> None:
        """Handle the parts of a frame other than its step."""
        self._parts[type(part)](part, now)

    def _on_frame(self, event: ev.FrameArrived, now: float) -> None:
        """Handle the parts as if they came one after another, at one time; what follows every event is done once."""
        is_first = True
        for part in event.parts:
            if not is_first:
                self._serve_queue(now)
            is_first = False
            self._parts[type(part)](part, now)

    def _on_tokens_only_frame(self, event: ev.TokensOnlyFrame, now: float) -> None:
        """Handle a frame that turned out to need attention now."""
        step = ev.StepArrived(event.shard_id, event.step)
        self._on_frame(ev.FrameArrived(event.shard_id, [*event.read_rest(), step]), now)

    def _on_step(self, event: ev.StepArrived, now: float) -> None:
        shard = self._fleet.shards.get(event.shard_id)
        if shard is not None:
            self._relay.on_step(shard, event.step, now)
            if event.step.finishes:
                self._health.on_ends(shard, now)

    def _on_kv_events(self, event: ev.KvEventsArrived, now: float) -> None:
        if event.shard_id in self._fleet.shards and self._index.apply_events(
            event.shard_id, event.number, event.changes, now
        ):
            self._action_buffer.add(WantKvSnapshot(event.shard_id))

    def _on_kv_snapshot(self, event: ev.KvSnapshotArrived, _now: float) -> None:
        if event.shard_id in self._fleet.shards and self._index.apply_snapshot(
            event.shard_id, event.number, event.block_hashes
        ):
            self._action_buffer.add(WantKvSnapshot(event.shard_id))

    def _on_adapters(self, event: ev.AdaptersReported, now: float) -> None:
        shard = self._fleet.shards.get(event.shard_id)
        if shard is not None:
            if shard.adapters.report(event.adapters, event.load_seconds, now):
                self._queue.requeue_all(shard, now)  # those that wait for an adapter that is gone can go elsewhere
            self._note_fleet_change()

    def _on_load(self, event: ev.LoadReported, now: float) -> None:
        shard = self._fleet.shards.get(event.shard_id)
        if shard is None:
            return
        if self._ledger.report(event.shard_id, event.load) or shard.is_draining:
            self._queue.mark_dirty(event.shard_id)
        if shard.is_draining != event.load.draining:
            shard.is_draining = event.load.draining
            self._fleet.note_readiness()
            if shard.is_draining:
                self._queue.requeue_all(shard, now)
            self._note_fleet_change()
        if shard.is_withdrawn != event.load.withdrawn:
            shard.is_withdrawn = event.load.withdrawn
            self._note_fleet_change()
        shard.is_asleep = event.load.asleep
        if shard.health is not None:
            shard.health.note_load(event.load)
        self._health.on_load(shard, hands_over=event.load.hand_over and event.load.draining, now=now)
        if event.load.empty_within_seconds is not None or shard.departure is not None:
            self._departing.on_load(shard, event.load.empty_within_seconds if event.load.draining else None, now)
