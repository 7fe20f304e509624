"""What placements cost where requests wait, in events and in shards that are scored, which are the same on every
machine; and that the shards which are not scored would not have been picked."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from router.core.actions import Action, PlacementDecided, SubmitAttempt
from router.core.core import CoreConfig
from router.core.dispatch.openings import Openings
from router.core.placement.candidates import CandidateBuilder
from router.core.placement.placer import MAX_EXPLAINED
from router.core.placement.plan import Pick
from tools.simulate.fleet.profile import PROFILES
from tools.simulate.workload import Call, SimulationResult
from tools.simulate.world import FleetOptions, simulate

BLOCK = 512
UNLIMITED = 2**40


class Prompts:
    """Requests that share long prefixes, without follow-ups."""

    block_size = BLOCK

    def __init__(self, num_calls: int, rate: float, num_prefixes: int, seed: int) -> None:
        drawn = random.Random(seed)
        at = 0.0
        self.calls: list[tuple[float, Call]] = []
        for number in range(num_calls):
            at += drawn.expovariate(rate)
            prefix, num_own = drawn.randrange(num_prefixes), drawn.randrange(200, 4000)
            shared = [prefix * 1000 + block for block in range(117)]
            own = [10**9 + number * 100 + block for block in range(num_own // BLOCK)]
            length = 117 * BLOCK + num_own
            self.calls.append((at, Call(number, length, drawn.randrange(1, 600), (*shared, *own), str(number))))

    def first_calls(self) -> Iterator[tuple[float, Call]]:
        yield from self.calls

    def next_calls(self, _call: Call, _finished_at: float) -> Iterator[tuple[float, Call]]:
        yield from ()


def run(
    workload: Prompts, num_shards: int, sample_share: float = 0.0, picks: list[Pick] | None = None
) -> tuple[SimulationResult, list[str]]:
    sent: list[str] = []

    def note(action: Action, now: float) -> None:
        if isinstance(action, SubmitAttempt):
            sent.append(f"{now:.9f} {action.shard_id} {action.request.request_id}")
        elif isinstance(action, PlacementDecided) and picks is not None:
            picks.append(action.pick)

    config = CoreConfig(
        max_queued_requests=UNLIMITED,
        max_queue_seconds=1e9,
        request_timeout_seconds=1e9,
        policy="ect",
        answer_mode="off",
        safety_required=False,
        decision_sample_share=sample_share,
    )
    options = FleetOptions(profile=PROFILES["8b"], num_shards=num_shards, core_config=config, on_action=note)
    return simulate(workload, options), sent


@pytest.mark.parametrize(("num_shards", "seed"), [(12, 0), (12, 1), (24, 2)])
def test_shards_that_are_not_scored_would_not_have_been_picked(num_shards: int, seed: int) -> None:
    """All shards are scored for a placement that is to be explained, or MAX_EXPLAINED of a larger fleet, and only the
    promising ones otherwise."""
    workload = Prompts(60, 8.0, 5, seed)
    assert run(workload, num_shards)[1] == run(workload, num_shards, sample_share=1.0)[1]


def test_an_explanation_of_a_large_fleet_has_the_picked_shard_and_few_others() -> None:
    """Explanations are on by default: scoring all of 128 shards for each would cost more than the rest of a request."""
    picks: list[Pick] = []
    run(Prompts(60, 8.0, 5, 3), 40, sample_share=1.0, picks=picks)
    for pick in picks:
        shard_ids = [shard.shard_id for shard in pick.plan.shards]
        assert pick.picked_shard_id == shard_ids[0]
        assert len(shard_ids) == len(set(shard_ids)) >= MAX_EXPLAINED
    assert sum(len(pick.candidates) for pick in picks) < 1.5 * MAX_EXPLAINED * len(picks)


def test_no_request_is_looked_at_again_while_nothing_changes() -> None:
    """While a chunk of a prompt was computed, the router looked every millisecond whether the rest could be sent: 80
    events a request."""
    result, _ = run(Prompts(60, 1.0, 12, 1), 8)
    assert result.num_router_events < 30 * len(result.outcomes)


def test_few_shards_of_a_large_fleet_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is cached somewhere was compared with every shard of the fleet."""
    num_scored = 0
    original = CandidateBuilder.one

    def count(self: CandidateBuilder, *args: object) -> object:
        nonlocal num_scored
        num_scored += 1
        return original(self, *args)

    monkeypatch.setattr(CandidateBuilder, "one", count)
    num_calls, num_shards = 120, 128
    run(Prompts(num_calls, 2.0, 3, 1), num_shards)
    assert num_scored < num_calls * num_shards / 8


def test_openings_give_the_times_that_were_set_last() -> None:
    """The heap keeps entries that have become void."""
    openings, times = Openings(), dict[str, float]()
    drawn = random.Random(3)
    for _ in range(2000):
        shard_id, at = str(drawn.randrange(8)), float(drawn.randrange(1, 1000))
        openings.set(shard_id, at)
        times[shard_id] = at
        if drawn.random() < 0.2:
            openings.discard(shard_id)
            del times[shard_id]
        assert openings.next() == min(times.values(), default=float("inf"))
        assert len(openings._heap) <= 2 * 8 + 17
    due = openings.take_due(500.0)
    assert sorted(due) == sorted(shard_id for shard_id, at in times.items() if at <= 500.0)
    assert [times[shard_id] for shard_id in due] == sorted(times[shard_id] for shard_id in due)
    assert openings.next() > 500.0
