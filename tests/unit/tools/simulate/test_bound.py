"""The bound, recomputed by hand."""

from __future__ import annotations

import math

import pytest

from tests.unit.tools.simulate.test_traces import play, session, turn, write_lines
from tools.simulate.bound import decode_seconds, prefill_seconds, simulate_bound
from tools.simulate.fleet.fleet import ModelFleet
from tools.simulate.fleet.profile import Profile
from tools.simulate.traces import read_trace
from tools.simulate.traces.open_loop import OpenLoopWorkload
from tools.simulate.workload import Call

PROFILE = Profile(
    name="slow",
    step_floor_seconds=0.5,
    seconds_per_prefill_token=0.01,
    seconds_per_attention_pair=0.001,
    seconds_per_context_token=0.002,
    seconds_per_decode_sequence=0.1,
    chunk_tokens=100,
    capacity_tokens=1000,
)


def one_model(num_shards: int) -> list[ModelFleet]:
    return [ModelFleet(name="m", num_shards=num_shards, profile=PROFILE)]


def test_prefill_costs_what_its_steps_cost():
    """The time is that of the fleet model chunk by chunk, and the short last chunk is still a step."""

    def by_hand(position: int, chunks: list[int]) -> float:
        seconds = 0.0
        for chunk in chunks:
            seconds += max(0.5, 0.01 * chunk) + 0.001 * chunk * (position + chunk / 2)
            position += chunk
        return seconds

    assert prefill_seconds(PROFILE, 230, 0) == pytest.approx(by_hand(0, [100, 100, 30]))
    assert prefill_seconds(PROFILE, 230, 130) == pytest.approx(by_hand(130, [100]))
    assert prefill_seconds(PROFILE, 230, 229) == pytest.approx(by_hand(229, [1]))


def test_decoding_costs_what_its_steps_cost():
    """The first token is part of prefill."""
    assert decode_seconds(PROFILE, 100, 1) == 0
    by_hand = math.fsum(0.6 + 0.002 * (100 + index) for index in range(1, 4))
    assert decode_seconds(PROFILE, 100, 4) == pytest.approx(by_hand)


def test_one_queue_and_one_cache_for_all_servers():
    """A free server takes the next call and has all blocks that any server has computed."""
    calls = [
        (0.0, Call(0, 100, 1, (1, 2))),
        (0.0, Call(1, 100, 1, (3, 4))),
        (1.0, Call(2, 150, 1, (1, 2, 9))),
        (1.0, Call(3, 100, 1, (3, 4))),
    ]
    result = simulate_bound(OpenLoopWorkload(50, calls), one_model(2))
    by_id = {outcome.call.call_id: outcome for outcome in result.outcomes}
    alone = prefill_seconds(PROFILE, 100, 0)
    assert [by_id[index].num_cached_tokens for index in range(4)] == [0, 0, 100, 99]
    assert by_id[0].ttft_seconds == by_id[1].ttft_seconds == pytest.approx(alone)
    assert by_id[2].ttft_seconds == pytest.approx(alone + prefill_seconds(PROFILE, 150, 100) - 1)
    assert by_id[3].ttft_seconds == pytest.approx(alone + prefill_seconds(PROFILE, 100, 99) - 1)
    ends = [outcome.finished_at for outcome in result.outcomes]
    assert ends == sorted(ends)


def test_sessions_continue_when_their_answers_end(tmp_path):
    """In a closed loop the next call follows the end of the previous one and finds its prefix."""
    lines = [session([turn(0, [1, 2]), turn(9, [1, 2, 3], think=5.0)])]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", lines), "weka")
    first, second = simulate_bound(trace.workload(1, 0), one_model(3)).outcomes[:2]
    assert second.arrived_at == pytest.approx(first.finished_at + 5)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 128)
    assert len(play(trace, 1, 2)) == 2
