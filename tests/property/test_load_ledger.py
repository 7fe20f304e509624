"""The load ledger against a naive model: sums are exact, nothing is released twice, nothing goes negative."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core.events import ShardLoad
from router.core.load_ledger import REPORT_LAG_SECONDS, LoadLedger, Reservation, ReservationKey

SHARDS = ["a", "b"]


class LoadLedgerMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.ledger = LoadLedger()
        for shard_id in SHARDS:
            self.ledger.add_shard(shard_id)
        self.now = 0.0
        self.held: dict[ReservationKey, Reservation] = {}
        self.unreported: set[ReservationKey] = set()
        self.reports = dict.fromkeys(SHARDS, ShardLoad())

    @rule(
        key=st.tuples(st.sampled_from(["x", "y", "z"]), st.integers(1, 2)),
        shard_id=st.sampled_from(SHARDS),
        num_sequences=st.integers(1, 4),
        num_prefill_tokens=st.integers(0, 5000),
    )
    def reserve(self, key: ReservationKey, shard_id: str, num_sequences: int, num_prefill_tokens: int) -> None:
        """A second dispatch under the name of one that is held would make its release ambiguous: refused."""
        reservation = Reservation(shard_id, num_sequences, num_prefill_tokens, num_prefill_tokens // 16, self.now)
        if key in self.held:
            with pytest.raises(KeyError):
                self.ledger.reserve(key, reservation)
            return
        self.ledger.reserve(key, reservation)
        self.held[key] = reservation
        self.unreported.add(key)

    @rule(key=st.tuples(st.sampled_from(["x", "y", "z"]), st.integers(1, 2)))
    def release(self, key: ReservationKey) -> None:
        """Only what is held can be released: a late frame of an earlier attempt releases nothing."""
        if key not in self.held:
            with pytest.raises(KeyError):
                self.ledger.release(key)
            return
        self.ledger.release(key)
        del self.held[key]
        self.unreported.discard(key)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 9))
    def first_token(self, pick: int) -> None:
        key = sorted(self.held)[pick % len(self.held)]
        self.ledger.note_start(key)
        self.unreported.discard(key)

    @rule(shard_id=st.sampled_from(SHARDS), num_waiting=st.integers(0, 9), num_tokens=st.integers(0, 9999))
    def report(self, shard_id: str, num_waiting: int, num_tokens: int) -> None:
        """A report covers all placements but those so young that they may have crossed with it."""
        load = ShardLoad(num_waiting=num_waiting, num_queued_prefill_tokens=num_tokens)
        self.ledger.report(shard_id, load, self.now)
        self.reports[shard_id] = load
        for key in list(self.unreported):
            reservation = self.held[key]
            if reservation.shard_id == shard_id and reservation.placed_at <= self.now - REPORT_LAG_SECONDS:
                self.unreported.remove(key)

    @rule(seconds=st.sampled_from([0.001, 0.01]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def sums_are_exact(self) -> None:
        self.ledger.check_integrity()
        assert self.ledger.keys() == self.held.keys()
        for shard_id in SHARDS:
            view = self.ledger.view(shard_id)
            unreported = [self.held[key] for key in self.unreported if self.held[key].shard_id == shard_id]
            report = self.reports[shard_id]
            assert view.num_waiting == report.num_waiting + sum(r.num_sequences for r in unreported)
            expected = report.num_queued_prefill_tokens + sum(r.num_prefill_tokens for r in unreported)
            assert view.num_queued_prefill_tokens == expected


TestLoadLedger = LoadLedgerMachine.TestCase
TestLoadLedger.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
