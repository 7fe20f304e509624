"""The load ledger against a naive model: sums are exact, nothing is released twice, nothing becomes negative."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core.events import ShardLoad
from router.core.load.load_ledger import LoadLedger
from router.core.load.load_view import Reservation, ReservationKey
from tests.examples import num_examples

SHARDS = ["a", "b"]
KEYS = st.tuples(st.sampled_from(["x", "y", "z"]), st.integers(1, 2))


class LoadLedgerMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.ledger = LoadLedger()
        for shard_id in SHARDS:
            self.ledger.add_shard(shard_id, "m", 1000, yield_tokens=512)
        self.now = 0.0
        self.held: dict[ReservationKey, Reservation] = {}
        self.started: set[ReservationKey] = set()
        self.reports = dict.fromkeys(SHARDS, ShardLoad())

    @rule(
        key=KEYS,
        shard_id=st.sampled_from(SHARDS),
        num_sequences=st.integers(1, 4),
        num_prefill_tokens=st.integers(1, 5000),
        num_cached_tokens=st.integers(0, 5000),
        class_rank=st.integers(0, 3),
    )
    def reserve(
        self,
        key: ReservationKey,
        shard_id: str,
        num_sequences: int,
        num_prefill_tokens: int,
        num_cached_tokens: int,
        class_rank: int,
    ) -> None:
        """A second dispatch with the key of a held reservation is refused, because its release would be ambiguous."""
        num_blocks = (num_prefill_tokens + num_cached_tokens) // 16
        reservation = Reservation(
            shard_id,
            num_sequences,
            num_prefill_tokens,
            num_cached_tokens,
            num_blocks,
            self.now,
            class_rank=class_rank,
        )
        if key in self.held:
            with pytest.raises(KeyError):
                self.ledger.reserve(key, reservation)
            return
        self.ledger.reserve(key, reservation)
        self.held[key] = reservation

    @rule(key=KEYS)
    def release(self, key: ReservationKey) -> None:
        """Only a held reservation can be released: a late frame of an earlier attempt releases nothing."""
        if key not in self.held:
            with pytest.raises(KeyError):
                self.ledger.release(key)
            return
        self.ledger.release(key)
        del self.held[key]
        self.started.discard(key)

    @precondition(lambda self: self.held)
    @rule(shard_id=st.sampled_from(SHARDS), picks=st.lists(st.integers(0, 9), max_size=3))
    def first_tokens(self, shard_id: str, picks: list[int]) -> None:
        """Several attempts have their first token in one step. An attempt that had started already changes nothing."""
        mine = sorted(key for key, reservation in self.held.items() if reservation.shard_id == shard_id)
        keys = list(dict.fromkeys(mine[pick % len(mine)] for pick in picks)) if mine else []
        self.ledger.note_starts(shard_id, [(key, 0.001) for key in keys], self.now)
        self.started.update(keys)

    @rule(
        shard_id=st.sampled_from(SHARDS),
        waiting=st.tuples(st.integers(0, 9), st.integers(0, 9)),
        running=st.tuples(st.integers(0, 9), st.integers(0, 9)),
        num_tokens=st.tuples(st.integers(0, 9999), st.integers(0, 9999)),
    )
    def report(
        self, shard_id: str, waiting: tuple[int, int], running: tuple[int, int], num_tokens: tuple[int, int]
    ) -> None:
        """Each pair is this router's own load and other routers' load."""
        self.reports[shard_id] = load = ShardLoad(
            num_waiting=sum(waiting),
            num_own_waiting=waiting[0],
            num_running=sum(running),
            num_own_running=running[0],
            num_queued_prefill_tokens=sum(num_tokens),
            num_own_queued_prefill_tokens=num_tokens[0],
            num_available_blocks=500,
        )
        self.ledger.report(shard_id, load)

    @rule(seconds=st.sampled_from([0.001, 0.1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    def _check_classes(self, shard_id: str) -> None:
        """What gives way is a part of the queue, the larger the more urgent the request, and nothing for the least
        urgent one."""
        view = self.ledger.view(shard_id)
        parts = [view.yielding(rank, self.now) for rank in range(4)]
        for (seconds, num_tokens), (next_seconds, next_tokens) in itertools.pairwise(parts):
            assert seconds >= next_seconds - 1e-9
            assert num_tokens >= next_tokens
        assert parts[3] == (0.0, 0)
        assert parts[0][0] <= view.queue_seconds(self.now) + 1e-9
        assert parts[0][1] <= view.queued_work.num_tokens
        mine = [r for r in self.held.values() if r.shard_id == shard_id]
        for rank in range(4):
            assert view.num_urgent_sequences(rank) == sum(r.num_sequences for r in mine if r.class_rank < rank)

    @invariant()
    def sums_are_exact(self) -> None:
        self.ledger.check_integrity()
        assert self.ledger.keys() == self.held.keys()
        for shard_id in SHARDS:
            self._check_classes(shard_id)
        for shard_id in SHARDS:
            view, report = self.ledger.view(shard_id), self.reports[shard_id]
            mine = {key: r for key, r in self.held.items() if r.shard_id == shard_id}
            queued = [r for key, r in mine.items() if key not in self.started]
            running = [r for key, r in mine.items() if key in self.started]
            foreign_waiting = report.num_waiting - report.num_own_waiting
            assert view.num_waiting == foreign_waiting + sum(r.num_sequences for r in queued)
            foreign_running = report.num_running - report.num_own_running
            assert view.num_running == foreign_running + sum(r.num_sequences for r in running)
            foreign_tokens = report.num_queued_prefill_tokens - report.num_own_queued_prefill_tokens
            assert view.num_queued_prefill_tokens == foreign_tokens + sum(r.num_prefill_tokens for r in queued)

    @invariant()
    def estimates_make_sense(self) -> None:
        """Whatever was learned, a wait is never negative, and more work never takes less time."""
        for shard_id in SHARDS:
            view = self.ledger.view(shard_id)
            assert 0.0 <= view.queue_seconds(self.now) <= view.queue_seconds(0.0)
            few, many = (view.memory_seconds(number, number, 100, self.now) for number in (10, 500))
            assert few[0] <= many[0]
            assert few[1] >= 0.0
            assert view.decode_delay_seconds(1000, 100, 0.0) >= 0.0


TestLoadLedger = LoadLedgerMachine.TestCase
TestLoadLedger.settings = settings(max_examples=num_examples(50), stateful_step_count=40, deadline=None)
