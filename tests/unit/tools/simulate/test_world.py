"""The simulated fleet: real router cores over modelled shards."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest

from kvloom.v1.generation_pb2 import FinishReason
from router.core.actions import CancelOnShard, PlacementDecided, RequestEnded, SendStep, SubmitAttempt, WantKvSnapshot
from router.core.core import CoreConfig
from tests.fakes.sim_calls import ListedWorkload, conversations
from tools.simulate.fleet.profile import PROFILES, Profile
from tools.simulate.fleet.scaling import ObservedFleet
from tools.simulate.workload import Call
from tools.simulate.world import FleetOptions, simulate

PROFILE = Profile(
    name="small",
    step_floor_seconds=0.02,
    seconds_per_prefill_token=0.0005,
    seconds_per_attention_pair=1e-7,
    seconds_per_context_token=1e-6,
    chunk_tokens=128,
    capacity_tokens=16 * 120,
    max_batch=4,
)
VARIANTS = {
    "fresh": {},
    "stale": {"staleness_seconds": 0.7},
    "four routers": {"num_routers": 4},
    "two stale routers": {"num_routers": 2, "staleness_seconds": 0.3},
    "shortest prefill": {"engine_order": "shortest_prefill"},
    "peer fetch": {"peer_fetch_bytes_per_second": 1e9},
    "both": {"engine_order": "shortest_prefill", "peer_fetch_bytes_per_second": 1e9},
    "mixed speeds": {"speed_factors": (1.0, 2.0, 0.5)},
    "round robin": {"policy": "round_robin"},
}


def _workload():
    return conversations(12, 12, block_size=16, calls_per_second=6.0)


def _options(**changes) -> FleetOptions:
    return FleetOptions(**{"profile": PROFILE, "num_shards": 3, **changes})


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_call_has_one_outcome_and_all_its_tokens(changes) -> None:
    """Whatever the fleet is made of: nothing is lost, nothing counted twice, and only delivered tokens are metered."""
    workload = _workload()
    ended, delivered = Counter(), Counter()

    def on_action(action, now) -> None:
        if isinstance(action, RequestEnded):
            ended[int(action.request_id)] += 1
            assert action.reason == FinishReason.FINISH_REASON_LENGTH
        elif isinstance(action, SendStep):
            for slot, num_tokens in zip(
                action.step.slots, action.step.num_tokens or [1] * len(action.step.slots), strict=True
            ):
                delivered[slot] += num_tokens
        assert not isinstance(action, WantKvSnapshot | CancelOnShard)

    result = simulate(workload, _options(on_action=on_action, **changes))
    calls = {call.call_id: (at, call) for at, call in workload.first_calls()}
    assert sorted(outcome.call.call_id for outcome in result.outcomes) == sorted(calls)
    assert set(ended.values()) == {1}
    assert delivered == {call_id: call.num_output_tokens for call_id, (_, call) in calls.items()}
    for outcome in result.outcomes:
        assert not outcome.failed
        assert outcome.arrived_at == calls[outcome.call.call_id][0]
        assert PROFILE.step_floor_seconds / 2 <= outcome.ttft_seconds <= outcome.finished_at - outcome.arrived_at
        assert 0 <= outcome.num_cached_tokens < outcome.call.num_prompt_tokens
    finished = [outcome.finished_at for outcome in result.outcomes]
    assert finished == sorted(finished)
    assert {outcome.shard_index for outcome in result.outcomes} == {0, 1, 2}
    assert result.router_cpu_seconds > 0


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=() if name in ("two stale routers", "both") else pytest.mark.long)
        for name, changes in VARIANTS.items()
    ],
)
def test_a_run_can_be_repeated_exactly(changes) -> None:
    """A figure in a table must be the same tomorrow."""
    first, second = (simulate(_workload(), _options(**changes)) for _ in range(2))
    assert first.outcomes == second.outcomes
    assert first.samples == second.samples
    assert first.num_router_events == second.num_router_events


def test_one_call_by_hand() -> None:
    """From arrival at the router to the last token, with nothing in between that the fleet model does not name."""
    profile = PROFILES["70b"]
    workload = ListedWorkload([(1.5, Call(0, 1000, 3, (1,)))], 512)
    (outcome,) = simulate(workload, FleetOptions(profile=profile, num_shards=2)).outcomes
    attention_seconds = profile.seconds_per_attention_pair * 1000 * 500
    ttft = max(profile.step_floor_seconds, profile.seconds_per_prefill_token * 1000) + attention_seconds
    assert outcome.ttft_seconds == pytest.approx(ttft)
    decode = 2 * (profile.step_floor_seconds + 2e-5) + profile.seconds_per_context_token * (1001 + 1002)
    assert outcome.finished_at == pytest.approx(1.5 + ttft + decode)
    assert outcome.tpot_seconds == pytest.approx(decode / 2)


def test_a_slow_shard_takes_so_many_times_longer() -> None:
    """Heterogeneous fleets are made by one factor."""
    outcomes = [
        simulate(
            ListedWorkload([(0.0, Call(0, 100, 50, ()))], 16), _options(num_shards=1, speed_factors=(factor,))
        ).outcomes[0]
        for factor in (1.0, 3.0)
    ]
    assert outcomes[1].finished_at == pytest.approx(3 * outcomes[0].finished_at)


def test_the_router_knows_which_blocks_are_cached_where() -> None:
    """With calls one by one, the overlap that a placement was based on is what the shard then finds in its cache."""
    workload = conversations(6, 20, block_size=16, calls_per_second=0.05)
    overlaps: dict[int, int] = {}

    def on_action(action, now) -> None:
        if isinstance(action, PlacementDecided):
            picked = action.plan.shards[0]
            overlaps[int(action.request.request_id)] = picked.num_overlap_tokens

    config = CoreConfig(answer_mode="off", safety_required=False, decision_sample_share=1.0)
    result = simulate(workload, _options(core_config=config, on_action=on_action))
    cached = {outcome.call.call_id: outcome.num_cached_tokens for outcome in result.outcomes}
    assert overlaps == cached
    assert sum(cached.values()) > 0


def test_a_prompt_that_no_cache_can_hold_fails() -> None:
    """It ends at once, and what comes after it in a closed loop still comes."""
    workload = ListedWorkload([(0.0, Call(0, 16 * 120, 10, ()))], 16, followers={0: (1.0, Call(1, 100, 10, ()))})
    first, second = simulate(workload, _options()).outcomes
    assert first.failed
    assert first.finished_at == 0.0
    assert not second.failed
    assert second.arrived_at == 1.0


def test_a_closed_loop_continues_after_each_end() -> None:
    """The next call comes a think time after the end of the one before."""
    calls = [Call(n, 200, 20, ()) for n in range(5)]
    workload = ListedWorkload([(0.0, calls[0])], 16, followers={n: (2.5, calls[n + 1]) for n in range(4)})
    outcomes = simulate(workload, _options()).outcomes
    assert len(outcomes) == 5
    for before, after in itertools.pairwise(outcomes):
        assert after.arrived_at == pytest.approx(before.finished_at + 2.5)


def test_call_i_is_sent_to_router_i_modulo_their_number() -> None:
    """With even calls only, the second of two routers places nothing, and the first decides as if it were alone."""
    workload = _workload()
    even = [(at, call) for at, call in workload.first_calls() if call.call_id % 2 == 0]
    alone = simulate(ListedWorkload(even, 16), _options(num_routers=1))
    beside = simulate(ListedWorkload(even, 16), _options(num_routers=2))
    assert beside.outcomes == alone.outcomes
    odd = simulate(
        ListedWorkload([(at, dataclasses.replace(call, call_id=call.call_id + 1)) for at, call in even], 16),
        _options(num_routers=2),
    )
    assert odd.num_router_events == beside.num_router_events


def test_what_does_not_fit_into_the_shards_waits_in_the_router() -> None:
    """More calls at once than the router may have outstanding: all of them are served in the end."""
    workload = ListedWorkload([(0.0, Call(n, 30, 5, ())) for n in range(100)], 16)
    most = Counter()

    def on_action(action, now) -> None:
        if isinstance(action, SubmitAttempt):
            most[now] += 1

    result = simulate(workload, _options(on_action=on_action))
    assert len(result.outcomes) == 100
    assert len(most) > 1, "all were submitted at once: the router's limit was not reached"


def test_router_timeouts_are_in_virtual_time() -> None:
    """Ticks come when the core wants them, and what it cancels is taken off the shards."""
    config = CoreConfig(answer_mode="off", safety_required=False, request_timeout_seconds=1.0)
    workload = ListedWorkload([(0.0, Call(0, 100, 500, ())), (0.5, Call(1, 100, 5, ()))], 16)
    outcomes = {o.call.call_id: o for o in simulate(workload, _options(core_config=config)).outcomes}
    assert outcomes[0].failed
    assert outcomes[0].finished_at == pytest.approx(1.0)
    assert not outcomes[1].failed


def test_samples_show_every_shard_at_every_interval() -> None:
    """Plots and imbalance are made from them; while nothing is under way there is nothing to show."""
    workload = ListedWorkload([(0.0, Call(0, 100, 100, ())), (500.0, Call(1, 100, 100, ()))], 16)
    samples = simulate(workload, _options(sample_interval_seconds=0.5)).samples
    times = sorted({sample.at for sample in samples})
    assert all(Counter(sample.at for sample in samples)[at] == 3 for at in times)
    assert times[:4] == [0.0, 0.5, 1.0, 1.5]
    assert max(times) > 500.0
    assert len(times) < 20
    assert sum(sample.num_running for sample in samples if sample.at == 0.5) == 1


def test_progress_is_reported() -> None:
    """Now and then, and at the end the whole number."""
    told: list[int] = []
    simulate(_workload(), _options(), told.append)
    assert told == sorted(told)
    assert told[-1] == 144


def test_impossible_fleets_are_rejected() -> None:
    """Before anything runs, with the reason."""
    for changes in (
        {"num_shards": 0},
        {"num_routers": 0},
        {"speed_factors": (1.0,)},
        {"speed_factors": (1.0, 0.0, 1.0)},
        {"staleness_seconds": -1.0},
        {"capacity_blocks": 0},
    ):
        with pytest.raises(ValueError):
            _options(**changes)
    with pytest.raises(ValueError, match="policy"):
        simulate(_workload(), _options(policy="no such policy"))


class _Steps:
    """A scaler that wants what it is told, at each decision."""

    num_first_shards = 1
    interval_seconds = 1.0
    start_seconds = 2.5

    def __init__(self, *wanted: int) -> None:
        self._wanted = wanted
        self.seen: list[tuple[int, int]] = []

    def wanted(self, fleet: ObservedFleet) -> int:
        self.seen.append((len(fleet.ready), fleet.num_starting))
        return self._wanted[min(len(self.seen) - 1, len(self._wanted) - 1)]


def test_shards_come_and_go_and_no_call_is_lost() -> None:
    """Laws of autoscaling are compared by what shards cost, from the decision that starts one to its last sequence."""
    workload = _workload()
    scaler = _Steps(3, 3, 3, 3, 3, 3, 1)
    result = simulate(workload, _options(scaler=scaler))
    assert sorted(one.call.call_id for one in result.outcomes) == list(range(144))
    assert not any(one.failed for one in result.outcomes)
    assert scaler.seen[:5] == [(1, 0), (1, 2), (1, 2), (3, 0), (3, 0)]
    assert scaler.seen[-1] == (1, 0)
    late = max(one.finished_at for one in result.outcomes)
    assert {one.shard_index for one in result.outcomes} == {0, 1, 2}
    assert late + 2 * 5 < result.shard_seconds < 3 * late
    assert result.shard_counts[0] == (0.0, 1)
    assert max(number for _, number in result.shard_counts) == 3


def test_a_shard_that_starts_again_has_an_empty_cache() -> None:
    """What a cold cache costs is a part of what scaling costs."""
    call = Call(0, 160, 4, range(1, 11))
    calls = [(0.0, call)] + [(10.0 + n, dataclasses.replace(call, call_id=1 + n)) for n in range(2)]
    workload = ListedWorkload(calls, block_size=16)

    class Replaced(_Steps):
        def wanted(self, fleet: ObservedFleet) -> int:
            super().wanted(fleet)
            return 2 if 2 < fleet.at < 6 else 1

    result = simulate(workload, _options(num_shards=2, scaler=Replaced(1)))
    assert [one.num_cached_tokens > 0 for one in sorted(result.outcomes, key=lambda one: one.call.call_id)] == [
        False,
        True,
        True,
    ]
