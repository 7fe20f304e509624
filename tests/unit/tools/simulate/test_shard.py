"""The modelled shard in cases small enough to compute by hand. How it skips over steps is tested in tests/property."""

from __future__ import annotations

import math

import pytest

from tools.simulate.fleet.engine_order import AGING, ShortestPrefillFirst
from tools.simulate.fleet.kv_cache import ModelledKvCache
from tools.simulate.fleet.peer_fetch import PeerLink
from tools.simulate.fleet.profile import Profile
from tools.simulate.fleet.sequence import ShardSequence
from tools.simulate.fleet.shard import SimShard

BLOCK_SIZE = 10
FLOOR, PER_TOKEN, PER_PAIR, PER_CONTEXT, PER_SEQUENCE = 0.02, 0.001, 1e-6, 1e-5, 1e-4


def _profile(chunk_tokens: int = 100, max_batch: int = 8) -> Profile:
    return Profile(
        name="by-hand",
        step_floor_seconds=FLOOR,
        seconds_per_prefill_token=PER_TOKEN,
        seconds_per_attention_pair=PER_PAIR,
        seconds_per_context_token=PER_CONTEXT,
        seconds_per_decode_sequence=PER_SEQUENCE,
        chunk_tokens=chunk_tokens,
        capacity_tokens=1000,
        max_batch=max_batch,
        kv_bytes_per_token=10,
    )


class _Bench:
    """One shard, driven by hand."""

    def __init__(self, shard: SimShard) -> None:
        self.shard = shard
        self.starts: dict[int, float] = {}
        self.ends: dict[int, float] = {}
        self.sequences: dict[int, ShardSequence] = {}
        self.order: list[int] = []
        """Slots in the order of their first tokens."""

    def submit(self, slot: int, num_prompt_tokens: int, num_output_tokens: int, at: float = 0.0, name: int = 0) -> None:
        self.run_until(at)
        hashes = [1000 * (name or slot + 1) + n for n in range(num_prompt_tokens // BLOCK_SIZE)]
        sequence = ShardSequence(
            slot=slot, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens, hashes=hashes
        )
        self.sequences[slot] = sequence
        self.shard.submit(sequence, at)

    def run_until(self, at: float = 1e9) -> None:
        while self.shard.busy_until < at:
            now = self.shard.busy_until
            result = self.shard.end_steps(now)
            for sequence in result.starts:
                self.starts[sequence.slot] = now
                self.order.append(sequence.slot)
            self.ends.update({sequence.slot: now for sequence in result.ends})
            self.shard.begin_steps(now)


def _bench(num_blocks: int = 100, **profile) -> _Bench:
    return _Bench(SimShard("shard-0", _profile(**profile), BLOCK_SIZE, ModelledKvCache(num_blocks)))


def _decode_step(*context_tokens: int) -> float:
    return FLOOR + PER_CONTEXT * sum(context_tokens) + PER_SEQUENCE * len(context_tokens)


def test_one_prompt_in_two_chunks_then_decode() -> None:
    """The formula of the fleet model, by hand: the last chunk's step yields the first token, each later step one."""
    bench = _bench()
    bench.submit(0, 150, 3)
    bench.run_until()
    ttft = (100 * PER_TOKEN + PER_PAIR * 100 * 50) + (50 * PER_TOKEN + PER_PAIR * 50 * (100 + 25))
    assert bench.starts[0] == pytest.approx(ttft)
    assert bench.ends[0] == pytest.approx(ttft + _decode_step(151) + _decode_step(152))


def test_an_answer_of_one_token_ends_with_its_first() -> None:
    """There is nothing to decode after it."""
    bench = _bench()
    bench.submit(0, 100, 1)
    bench.run_until()
    assert bench.ends == bench.starts
    assert bench.shard.num_sequences == 0


def test_a_short_prompt_takes_the_floor() -> None:
    """No step is quicker than reading the weights."""
    bench = _bench()
    bench.submit(0, 5, 1)
    bench.run_until()
    assert bench.starts[0] == pytest.approx(FLOOR + PER_PAIR * 5 * 2.5)


def test_a_sequence_submitted_during_decode_waits_for_the_end_of_the_step() -> None:
    """Continuous batching: the newcomer's prefill shares the next step with the decode of the other."""
    bench = _bench()
    bench.submit(0, 50, 100)
    first = 50 * PER_TOKEN + PER_PAIR * 50 * 25
    arrival = first + _decode_step(51) + 0.5 * _decode_step(52)
    bench.submit(1, 50, 1, at=arrival)
    bench.run_until()
    boundary = first + _decode_step(51) + _decode_step(52)
    shared_step = 50 * PER_TOKEN + PER_PAIR * 50 * 25 + PER_CONTEXT * 53 + PER_SEQUENCE
    assert bench.starts[1] == pytest.approx(boundary + shared_step)


def test_a_repeated_prompt_computes_its_last_block_only() -> None:
    """All of it lies in the cache, but the first output token comes from computing the last prompt token."""
    bench = _bench()
    bench.submit(0, 100, 1, name=7)
    bench.submit(1, 100, 1, at=10.0, name=7)
    bench.run_until()
    assert bench.sequences[1].num_cached_tokens == 90
    assert bench.starts[1] - 10.0 == pytest.approx(max(FLOOR, 10 * PER_TOKEN) + PER_PAIR * 10 * 95)


def test_first_come_first_served_with_a_blocked_head() -> None:
    """A long request that waits for blocks holds up a short one that would fit: that is what the fleet model says."""
    bench = _bench(num_blocks=20)
    bench.submit(0, 100, 50)  # 15 of 20 blocks
    bench.submit(1, 60, 40, at=0.001)  # 10 blocks: has to wait
    bench.submit(2, 10, 10, at=0.002)  # 2 blocks: would fit
    bench.run_until()
    assert bench.order == [0, 1, 2]
    assert bench.starts[1] > bench.ends[0]


def test_the_batch_has_a_limit() -> None:
    """With max_batch sequences running the next one waits for an end."""
    bench = _bench(max_batch=2)
    for slot in range(3):
        bench.submit(slot, 10, 20 + slot)
    bench.run_until()
    assert bench.starts[2] > bench.ends[0]


def test_load_counts_what_waits_in_full_and_what_runs_by_what_is_left() -> None:
    """As the torch engine reports it: prompts that wait count whole, a prompt in prefill its uncomputed rest."""
    bench = _bench(max_batch=1)
    bench.submit(0, 150, 5)
    bench.submit(1, 70, 5, at=0.01)
    load = bench.shard.load(0, 0.01)
    assert (load.num_running, load.num_waiting, load.num_queued_prefill_tokens) == (1, 1, 220)
    bench.run_until(0.11)  # one chunk of 100 is through
    load = bench.shard.load(0, 0.11)
    assert load.num_queued_prefill_tokens == 50 + 70
    assert load.num_available_blocks == 100 - 16
    assert load.prefill_tokens_per_second == pytest.approx(100 / (0.1 + PER_PAIR * 100 * 50))


def test_a_shard_knows_what_fits() -> None:
    """A sequence larger than the whole cache must be rejected instead of waiting forever."""
    bench = _bench(num_blocks=20)
    assert bench.shard.can_hold(150, 50)
    assert not bench.shard.can_hold(150, 51)


def test_cancelled_sequences_free_their_blocks() -> None:
    """Waiting, in prefill or in decode: at the end of the step nothing of them is left."""
    bench = _bench(max_batch=2)
    bench.submit(0, 50, 100)
    bench.run_until(0.2)
    bench.submit(1, 300, 100, at=0.2)
    bench.submit(2, 50, 100, at=0.21)
    for slot in range(3):
        bench.shard.cancel(0, slot, 0.22)
    bench.run_until()
    assert bench.ends.keys() == {0, 1, 2}
    assert bench.shard.num_used_blocks == 0
    assert bench.shard.num_queued_prefill_tokens == 0
    assert bench.shard.load(0, 1.0).num_decode_context_tokens == 0
    assert bench.shard.busy_until == math.inf


def _shortest_first_bench() -> _Bench:
    profile, cache = _profile(), ModelledKvCache(1000)
    order = ShortestPrefillFirst(profile, BLOCK_SIZE, cache)
    return _Bench(SimShard("shard-0", profile, BLOCK_SIZE, cache, order=order))


def test_shortest_prefill_overtakes_a_long_one_that_has_begun() -> None:
    """A short prompt need not wait until the long prompt is computed."""
    bench = _shortest_first_bench()
    bench.submit(0, 2000, 1)
    bench.submit(1, 50, 1, at=0.05)
    bench.run_until()
    assert bench.order == [1, 0]


def test_shortest_prefill_counts_what_the_cache_saves() -> None:
    """A long prompt whose prefix lies in the cache is a short one."""
    bench = _shortest_first_bench()
    bench.submit(0, 500, 1, name=9)
    bench.submit(1, 100, 1, at=5.0)
    bench.submit(2, 300, 1, at=5.01)
    bench.submit(3, 505, 1, at=5.02, name=9)
    bench.run_until()
    assert bench.order == [0, 1, 3, 2]


def test_a_long_prefill_does_not_starve_under_a_stream_of_short_ones() -> None:
    """Aging: it can only be overtaken by what arrives within (its own prefill / AGING) after it."""
    bench = _shortest_first_bench()
    bench.submit(0, 1000, 1)
    for slot in range(1, 400):
        bench.submit(slot, 100, 1, at=0.09 * slot)  # prefill takes 0.105 s: more than there is time for
    bench.run_until()
    own_seconds = 1000 * PER_TOKEN + PER_PAIR * 1000 * 500
    overtaken_by = bench.order.index(0)
    assert overtaken_by > 1
    assert 0.09 * overtaken_by <= own_seconds / AGING


def _peer_bench(bytes_per_second: float) -> _Bench:
    """A shard whose peer holds prompt 9 (100 blocks)."""
    profile, cache, peer = _profile(), ModelledKvCache(1000), ModelledKvCache(1000)
    lease = peer.admit(range(9000, 9100), 100, 100)
    assert lease is not None
    peer.store(lease, 100)
    link = PeerLink(profile, BLOCK_SIZE, bytes_per_second, 1.0, [peer])
    return _Bench(SimShard("shard-0", profile, BLOCK_SIZE, cache, peer_link=link))


def test_blocks_of_a_peer_are_fetched_where_that_is_quicker() -> None:
    """The rest of the prompt is computed once the transfer is through, and the blocks are this shard's from then on."""
    bench = _peer_bench(bytes_per_second=100_000)
    bench.submit(0, 1000, 1, name=9)
    bench.run_until()
    fetch_seconds = 990 * 10 / 100_000
    assert bench.starts[0] == pytest.approx(fetch_seconds + max(FLOOR, 10 * PER_TOKEN) + PER_PAIR * 10 * 995)
    assert bench.sequences[0].num_cached_tokens == 990
    assert bench.shard.cache.count_cached(range(9000, 9100), 100) == 100


def test_fetching_does_not_hold_up_decode() -> None:
    """Others go on while blocks are under way, and the fetched prompt joins at a step's end."""
    bench = _peer_bench(bytes_per_second=100_000)
    bench.submit(0, 50, 100)
    bench.submit(1, 1000, 1, at=0.5, name=9)
    bench.run_until()
    assert 0.599 < bench.starts[1] < 0.599 + 3 * _decode_step(100)
    alone = _bench()
    alone.submit(0, 50, 100)
    alone.run_until()
    assert bench.ends[0] - alone.ends[0] < FLOOR


def test_a_slow_link_is_not_used() -> None:
    """Where computing is quicker than the transfer, the shard computes."""
    bench = _peer_bench(bytes_per_second=1000)
    bench.submit(0, 1000, 1, name=9)
    bench.run_until()
    assert bench.sequences[0].num_cached_tokens == 0
