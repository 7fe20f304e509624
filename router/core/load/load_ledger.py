"""The reservations of this router's attempts, from which the load of each shard follows (load_view.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from kvloom_common.class_rank import INTERACTIVE_RANK
from router.core.events import ShardLoad
from router.core.expected_output import ExpectedOutput
from router.core.load.cost_order import CostOrder
from router.core.load.decode_speed import DecodeSpeed
from router.core.load.load_view import LoadView, Reservation, ReservationKey
from router.core.load.speed_model import PrefillWork, SpeedModel

MIN_LEARN_INTERVAL: Final = 0.02
"""Seconds between the beginnings of two prefills of a shard from which speeds are learned. Where prefill takes that
long, each is; where it is shorter, 50 a second tell as much, and all of them would cost an eighth of a request. An
observation is chosen by when it began, never by how long it took: that would bias what is learned."""


class LoadLedger:
    """The reservations and views of all shards. A reservation is made by a dispatch and released exactly once; a
    KeyError shows that a caller broke that."""

    def __init__(self) -> None:
        self._views: dict[str, LoadView] = {}
        self.views: Mapping[str, LoadView] = self._views
        """By shard, for a loop over many: a call of `view` for each would take as long as its work."""
        self._without_sequences: dict[str, LoadView] = {}
        self._reservations: dict[ReservationKey, Reservation] = {}
        self._fleet_speeds: dict[str, SpeedModel] = {}
        self._decode_speeds: dict[str, DecodeSpeed] = {}
        self._orders: dict[str, CostOrder] = {}
        """All by model. A model's is forgotten with its last shard: names come and go without end."""
        self.num_copies = Counter[str]()
        """By model: the copies of prefixes that are being computed."""
        self.expected_output = ExpectedOutput()
        """By tenant and model."""

    def add_shard(
        self, shard_id: str, model: str, num_blocks: int, yield_tokens: int = 0, growth_tokens: int = 0
    ) -> None:
        """`yield_tokens`: see ShardDescription; `growth_tokens`: see LoadView."""
        assert shard_id not in self._views
        fleet_speed = self._fleet_speeds.get(model)
        if fleet_speed is None:
            fleet_speed = self._fleet_speeds[model] = SpeedModel()
            self._decode_speeds[model] = DecodeSpeed()
            self._orders[model] = CostOrder(fleet_speed)
        view = self._views[shard_id] = LoadView(
            model, num_blocks, fleet_speed, self._decode_speeds[model], yield_tokens, growth_tokens
        )
        self._orders[model].add(shard_id, view)
        self._without_sequences[shard_id] = view

    def remove_shard(self, shard_id: str) -> None:
        """All reservations of the shard must have been released."""
        view = self._views.pop(shard_id)
        self._without_sequences.pop(shard_id, None)
        assert not view.own_running
        assert not view.own_waiting
        order = self._orders[view.model]
        order.remove(shard_id)
        if order.is_empty:
            del self._fleet_speeds[view.model]
            del self._decode_speeds[view.model]
            del self._orders[view.model]
            del self.num_copies[view.model]

    def view(self, shard_id: str) -> LoadView:
        return self._views[shard_id]

    def idle(self) -> set[str]:
        """The shards that have nothing to do, and for which no request waits in the router."""
        return {shard_id for shard_id, view in self._without_sequences.items() if not view.held}

    def report(self, shard_id: str, load: ShardLoad) -> bool:
        """Record a shard's load report. Returns True if it leaves the shard more room than the last one did: more free
        blocks, or less work of other routers."""
        view = self._views[shard_id]
        before, view.report = view.report, load
        num_waiting = max(0, load.num_waiting - load.num_own_waiting)
        num_running = max(0, load.num_running - load.num_own_running)
        has_more_room = (
            load.num_available_blocks > before.num_available_blocks
            or num_waiting < view.foreign_waiting
            or num_running < view.foreign_running
        )
        if num_waiting != view.foreign_waiting or num_running != view.foreign_running:
            view.foreign_waiting, view.foreign_running = num_waiting, num_running
            self._note_load(shard_id, view)
        num_queued_tokens = max(0, load.num_queued_prefill_tokens - load.num_own_queued_prefill_tokens)
        has_more_room = has_more_room or num_queued_tokens < view.foreign_queued_tokens
        view.foreign_queued_tokens = num_queued_tokens
        view.foreign_context_tokens = max(0, load.num_decode_context_tokens - load.num_own_decode_context_tokens)
        if load.prefill_tokens_per_second > 0 and not view.speed.num_observations:
            view.speed.set_reported_rate(load.prefill_tokens_per_second)
            self._orders[view.model].note_change(shard_id)
        view.freed_blocks = view.context_change = 0
        num_tokens, step_seconds = load.num_decode_context_tokens, load.decode_step_seconds
        if num_tokens and step_seconds > 0:
            view.decode_speed.observe(num_tokens, step_seconds)
            view.decode_factor = view.decode_speed.learned_factor(view.decode_factor, num_tokens, step_seconds)
        return has_more_room

    def _note_load(self, shard_id: str, view: LoadView) -> None:
        """More or fewer sequences wait or run there."""
        self._orders[view.model].note_change(shard_id)
        if view.num_running or view.num_waiting:
            self._without_sequences.pop(shard_id, None)
        else:
            self._without_sequences[shard_id] = view

    def order(self, model: str) -> CostOrder:
        """The shards of the model, in the order of the least that a request can cost there."""
        return self._orders[model]

    def reservation(self, key: ReservationKey) -> Reservation:
        return self._reservations[key]

    def reserve(self, key: ReservationKey, reservation: Reservation) -> None:
        if key in self._reservations:
            raise KeyError(key)
        view = self._views[reservation.shard_id]
        self._reservations[key] = reservation
        view.queued[key] = reservation
        work = reservation.work
        view.queued_work += work
        view.num_queued_cached_tokens += reservation.num_cached_tokens
        if reservation.is_copy:
            self.num_copies[view.model] += 1
        if view.ranked_work or reservation.class_rank != INTERACTIVE_RANK:
            view.note_queued(reservation)
        if reservation.is_arrival:
            share = reservation.num_cached_tokens / reservation.num_context_tokens
            view.bound_arrivals.add(share, reservation.placed_at)
        view.busy.add(view.speed.seconds(work, view.num_context_tokens), reservation.placed_at)
        view.own_waiting += reservation.num_sequences
        view.own_new_blocks += reservation.num_new_blocks
        view.own_expected_tokens += reservation.num_expected_tokens
        self._note_load(reservation.shard_id, view)

    def note_starts(self, shard_id: str, starts: Sequence[tuple[ReservationKey, float]], now: float) -> None:
        """First tokens came in one step, with how long each waited in the engine's queue: none of these is queued any
        more. Their prefill took the time since the previous step with first tokens, or since the engine started the
        first of these; waiting for KV blocks is not part of it."""
        view = self._views[shard_id]
        work: PrefillWork | None = None
        began_at = now
        num_context_tokens = view.num_context_tokens
        for key, queue_time_seconds in starts:
            reservation = view.queued.pop(key, None)
            if reservation is None:
                continue
            if reservation.class_rank != INTERACTIVE_RANK:
                view.note_dequeued(reservation)
            work = reservation.work if work is None else work + reservation.work
            began_at = min(began_at, reservation.placed_at + queue_time_seconds)
            view.running[key] = reservation
            view.num_queued_cached_tokens -= reservation.num_cached_tokens
            view.own_waiting -= reservation.num_sequences
            view.own_running += reservation.num_sequences
            view.own_context_tokens += reservation.num_context_tokens
            view.context_change += reservation.num_context_tokens
        if work is None:
            return
        view.queued_work -= work
        order = self._orders[view.model]
        order.note_change(shard_id)
        if not (view.foreign_queued_tokens or view.is_mixed):
            began_at = max(view.started_at, began_at)
            if began_at - view.learned_from >= MIN_LEARN_INTERVAL:
                view.learned_from = began_at
                view.speed.observe(work, num_context_tokens, now - began_at)
                view.fleet_speed.observe(work, num_context_tokens, now - began_at)
                order.note_fleet_speed()
        view.started_at = now
        if not view.queued:
            view.is_mixed = False

    def release(self, key: ReservationKey) -> None:
        reservation = self._reservations.pop(key)
        view = self._views[reservation.shard_id]
        load = view.report
        # The last report may be of after the end, and then has what was freed.
        is_news = load.num_own_running + load.num_own_waiting >= view.own_running + view.own_waiting
        if reservation.is_copy:
            self.num_copies[view.model] -= 1
        view.own_new_blocks -= reservation.num_new_blocks
        view.own_expected_tokens -= reservation.num_expected_tokens
        if reservation.class_rank != INTERACTIVE_RANK:
            view.count_ranked(reservation.class_rank, -reservation.num_sequences)
        if view.queued.pop(key, None) is not None:
            view.queued_work -= reservation.work
            view.num_queued_cached_tokens -= reservation.num_cached_tokens
            if reservation.class_rank != INTERACTIVE_RANK:
                view.note_dequeued(reservation)
            view.own_waiting -= reservation.num_sequences
        else:
            del view.running[key]
            if is_news:
                view.freed_blocks += reservation.num_new_blocks
                if view.growth_tokens:
                    view.freed_blocks += reservation.num_expected_tokens // view.growth_tokens
                view.context_change -= reservation.num_context_tokens + reservation.num_expected_tokens
            view.own_running -= reservation.num_sequences
            view.own_context_tokens -= reservation.num_context_tokens
        self._note_load(reservation.shard_id, view)

    @property
    def is_busy(self) -> bool:
        """True when anything is reserved."""
        return bool(self._reservations)

    def keys(self) -> set[ReservationKey]:
        """The keys of all reservations."""
        return set(self._reservations)

    def check_integrity(self) -> None:
        """Assert that every sum is the sum of its parts, that nothing is negative, and that nothing is kept of models
        that have gone."""
        assert (
            self._decode_speeds.keys()
            == self._fleet_speeds.keys()
            == self._orders.keys()
            == {view.model for view in self._views.values()}
        )
        assert self.idle() == {shard_id for shard_id, view in self._views.items() if view.is_idle}
        for order in self._orders.values():
            order.check_integrity()
        copies = Counter(self._views[r.shard_id].model for r in self._reservations.values() if r.is_copy)
        assert {model: num for model, num in self.num_copies.items() if num} == copies
        by_shard: dict[str, dict[ReservationKey, Reservation]] = {shard_id: {} for shard_id in self._views}
        for key, reservation in self._reservations.items():
            by_shard.setdefault(reservation.shard_id, {})[key] = reservation
        for shard_id, view in self._views.items():
            reserved = by_shard[shard_id]
            running = [r for key, r in reserved.items() if key not in view.queued]
            assert view.queued.items() <= reserved.items()
            assert view.running.keys() == reserved.keys() - view.queued.keys()
            assert view.own_waiting == sum(r.num_sequences for r in view.queued.values())
            assert view.own_running == sum(r.num_sequences for r in running)
            assert view.own_context_tokens == sum(r.num_context_tokens for r in running)
            assert view.own_new_blocks == sum(r.num_new_blocks for r in reserved.values())
            assert view.own_expected_tokens == sum(r.num_expected_tokens for r in reserved.values())
            assert view.num_queued_cached_tokens == sum(r.num_cached_tokens for r in view.queued.values())
            assert view.queued_work.num_requests == len(view.queued)
            assert view.queued_work.num_tokens == sum(r.num_prefill_tokens for r in view.queued.values())
            assert view.queued_work.num_pairs == sum(r.work.num_pairs for r in view.queued.values())
            ranks = {r.class_rank for r in view.queued.values()}
            assert view.ranked_work.keys() == ranks - {INTERACTIVE_RANK}
            for rank, work in view.ranked_work.items():
                own = [r.work for r in view.queued.values() if r.class_rank == rank]
                assert (work.num_requests, work.num_tokens) == (len(own), sum(one.num_tokens for one in own))
            assert view.is_mixed or len(ranks) < 2
            assert sum(view.ranked_sequences.values()) == sum(
                r.num_sequences for r in reserved.values() if r.class_rank != INTERACTIVE_RANK
            )
            assert min(view.num_waiting, view.num_running, view.num_queued_prefill_tokens) >= 0
