"""Compares the modelled shard, which skips steps, with one that simulates every step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import num_examples
from tests.fakes.naive_shard import NaiveSequence, NaiveShard
from tools.simulate.fleet.kv_cache import ModelledKvCache
from tools.simulate.fleet.profile import Profile
from tools.simulate.fleet.sequence import ShardSequence
from tools.simulate.fleet.shard import SimShard

BLOCK_SIZE = 4
PROFILE = Profile(
    name="small",
    step_floor_seconds=0.0101,
    seconds_per_prefill_token=0.00131,
    seconds_per_attention_pair=0.0000173,
    seconds_per_context_token=0.0000211,
    seconds_per_decode_sequence=0.00037,
    chunk_tokens=11,
    capacity_tokens=4096,
    max_batch=3,
)

_CALL = st.fixed_dictionaries(
    {
        # The odd factor keeps submissions off the ends of steps, where either order would be right.
        "gap": st.integers(1, 400).map(lambda n: n * 0.00129731),
        "symbols": st.lists(st.integers(0, 1), min_size=0, max_size=8),
        "num_odd_tokens": st.integers(1, BLOCK_SIZE),
        "num_output_tokens": st.integers(1, 60),
        "cancel_after": st.one_of(st.none(), st.integers(1, 300).map(lambda n: n * 0.00131777)),
    }
)


class _Both:
    """One shard of each kind under the same load."""

    def __init__(self, num_blocks: int) -> None:
        self.shard = SimShard("shard-0", PROFILE, BLOCK_SIZE, ModelledKvCache(num_blocks))
        self.naive = NaiveShard(PROFILE, BLOCK_SIZE, num_blocks)
        self.started_at: dict[int, float] = {}
        self.ended_at: dict[int, float] = {}
        self.kv_changes: list[tuple[list[int], list[int]]] = []

    def run_until(self, now: float) -> None:
        while self.shard.busy_until < now:
            self._end_and_begin(self.shard.busy_until)
        self.naive.run_until(now)

    def settle(self, now: float) -> None:
        """A sequence submitted to an idle shard starts at once."""
        if self.shard.busy_until == now:
            self._end_and_begin(now)

    def _end_and_begin(self, at: float) -> None:
        result = self.shard.end_steps(at)
        self.started_at.update({sequence.slot: at for sequence in result.starts})
        self.ended_at.update({sequence.slot: at for sequence in result.ends})
        if result.stored or result.removed:
            self.kv_changes.append((list(result.stored), sorted(result.removed)))
        self.shard.begin_steps(at)

    def check_load(self, now: float) -> None:
        load = self.shard.load(0, now)
        assert load.num_running == len(self.naive.running)
        assert load.num_waiting == len(self.naive.waiting)
        assert load.num_queued_prefill_tokens == self.naive.num_queued_prefill_tokens
        assert load.num_decode_context_tokens == self.naive.num_decode_context_tokens
        assert load.num_available_blocks == self.naive.cache.num_available
        assert load.num_own_decode_context_tokens == load.num_decode_context_tokens


@settings(max_examples=num_examples(300), deadline=None)
@given(num_blocks=st.integers(24, 60), calls=st.lists(_CALL, min_size=1, max_size=14))
def test_skipping_over_steps_changes_nothing(num_blocks, calls) -> None:
    """First tokens, ends, reuse, KV events and load reports are the same as when every step is simulated."""
    both = _Both(num_blocks)
    hashes_of: dict[tuple[int, ...], int] = {}
    naive_sequences: list[NaiveSequence] = []
    happenings = []
    now = 0.0
    for slot, call in enumerate(calls):
        now += call["gap"]
        happenings.append((now, slot, "submit"))
        if call["cancel_after"] is not None:
            happenings.append((now + call["cancel_after"], slot, "cancel"))
    for at, slot, kind in sorted(happenings):
        both.run_until(at)
        both.check_load(at)
        if kind == "cancel":
            both.shard.cancel(0, slot, at)
            both.naive.cancel(naive_sequences[slot])
            continue
        call = calls[slot]
        symbols = call["symbols"]
        hashes = [hashes_of.setdefault(tuple(symbols[:n]), len(hashes_of)) for n in range(1, len(symbols) + 1)]
        num_prompt_tokens = BLOCK_SIZE * len(symbols) + call["num_odd_tokens"]
        if call["num_odd_tokens"] == BLOCK_SIZE:
            hashes.append(hashes_of.setdefault((*symbols, 0), len(hashes_of)))
        sequence = ShardSequence(
            slot=slot,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=call["num_output_tokens"],
            hashes=hashes,
        )
        naive_sequences.append(NaiveSequence(slot, num_prompt_tokens, call["num_output_tokens"], hashes))
        both.shard.submit(sequence, at)
        both.naive.submit(naive_sequences[slot], at)
        both.settle(at)
    both.run_until(1e6)

    assert both.ended_at == pytest.approx({s.slot: s.ended_at for s in naive_sequences}, abs=1e-9)
    started = {s.slot: s.started_at for s in naive_sequences if s.started_at is not None}
    assert both.started_at == pytest.approx(started, abs=1e-9)
    assert both.kv_changes == both.naive.kv_changes
    load = both.shard.load(0, 1e6)
    assert load.decode_step_seconds == pytest.approx(both.naive.decode_step_seconds, rel=1e-9)
    assert both.shard.num_sequences == 0
    assert both.shard.busy_until == math.inf
    both.shard.cache.check_integrity([])
