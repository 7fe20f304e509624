"""What each placement policy considers, and which shards it prefers."""

from __future__ import annotations

import msgspec
import pytest

from router.core.placement import POLICIES, Arrival, Candidate

CANDIDATE = Candidate(
    shard_id="a",
    turn=3,
    block_size=16,
    num_blocks=1000,
    num_overlap_tokens=600,
    num_prefill_tokens=1000,
    num_queued_prefill_tokens=2000,
    num_running=4,
    num_waiting=2,
    num_context_tokens=5000,
    num_used_blocks=400.0,
    num_evicted_blocks=10,
    reuse_probability=0.5,
    queue_seconds=0.2,
    memory_wait_seconds=0.0,
    own_seconds=0.1,
    bound_arrival_rate=1.0,
    utilisation=0.5,
    memory_pressure_seconds=0.0,
    decode_delay_seconds=0.0,
    num_needed_blocks=63,
    num_expected_tokens=100,
)
ARRIVAL = Arrival("r", "", 1600, tuple(range(100)))


def cost(policy: str, *candidates: Candidate, arrival: Arrival = ARRIVAL) -> list[float]:
    return [sum(terms) for terms in POLICIES[policy]().costs(arrival, candidates)]


def other(**changes: object) -> Candidate:
    return msgspec.structs.replace(CANDIDATE, shard_id="b", **changes)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_term_has_a_name(policy: str) -> None:
    """An explanation without names explains nothing."""
    chosen = POLICIES[policy]()
    assert all(len(terms) == len(chosen.terms) for terms in chosen.costs(ARRIVAL, [CANDIDATE, other()]))


@pytest.mark.parametrize(
    ("policy", "worse"),
    [
        ("ect", {"own_seconds": 0.2}),
        ("ect", {"queue_seconds": 0.3}),
        ("ect", {"num_waiting": 3}),
        ("ect", {"memory_wait_seconds": 0.1}),
        ("ect", {"memory_pressure_seconds": 0.1}),
        ("ect", {"decode_delay_seconds": 0.1}),
        ("ect", {"num_evicted_blocks": 11}),
        ("conductor", {"own_seconds": 0.2}),
        ("conductor", {"queue_seconds": 0.3}),
        ("dynamo", {"num_prefill_tokens": 1100}),
        ("dynamo", {"num_queued_prefill_tokens": 2100}),
        ("dynamo", {"num_context_tokens": 6000}),
        ("gaie", {"num_waiting": 3}),
        ("gaie", {"num_used_blocks": 500.0}),
        ("gaie", {"num_overlap_tokens": 500}),
        ("lmetric", {"num_prefill_tokens": 1100}),
        ("lmetric", {"num_running": 5}),
        ("least_prefill", {"queue_seconds": 0.3}),
        ("least_requests", {"num_running": 5}),
        ("round_robin", {"turn": 4}),
    ],
)
def test_cost_rises_with_every_burden(policy: str, worse: dict[str, float]) -> None:
    """No term of a cost has the wrong sign."""
    better, burdened = cost(policy, CANDIDATE, other(**worse))
    assert burdened > better


def test_blocks_without_a_future_use_are_free_to_evict() -> None:
    """The price of an eviction is what it will cost to compute the blocks again."""
    prices = cost("ect", *(other(reuse_probability=probability) for probability in (0.9, 0.1, 0.0)))
    assert prices[0] > prices[1] > prices[2] == sum(cost("ect", other(num_evicted_blocks=0)))


def test_session_stays_where_it_is() -> None:
    """Session hashing ignores load, and moves only the sessions of a shard that has disconnected."""
    shards = [msgspec.structs.replace(CANDIDATE, shard_id=f"s{i}") for i in range(5)]
    arrivals = [Arrival(f"r{i}", f"session-{i % 20}", 10, ()) for i in range(40)]

    def pick(arrival: Arrival, among: list[Candidate]) -> str:
        costs = cost("session_hash", *among, arrival=arrival)
        return among[costs.index(min(costs))].shard_id

    picks = [pick(arrival, shards) for arrival in arrivals]
    assert picks[:20] == picks[20:]
    assert len(set(picks)) >= 4
    for arrival, before in zip(arrivals, picks, strict=True):
        assert before == "s0" or pick(arrival, shards[1:]) == before


def test_sglang_follows_the_last_inserter_unless_unbalanced() -> None:
    """A request with a match above the threshold is placed where the prefix was placed last; a crowded shard is avoided
    all the same."""
    policy = POLICIES["sglang"]()
    a, b = CANDIDATE, other(num_used_blocks=0.0)
    first = [sum(terms) for terms in policy.costs(ARRIVAL, [a, b])]
    assert first[1] < first[0], "without a match: the emptiest cache"
    policy.placed(ARRIVAL, "a")
    followed = [sum(terms) for terms in policy.costs(ARRIVAL, [a, b])]
    assert followed[0] < followed[1]
    crowded = [sum(terms) for terms in policy.costs(ARRIVAL, [msgspec.structs.replace(a, num_running=100), b])]
    assert crowded[1] < crowded[0]
    short = Arrival("x", "", 1600, (*range(20), *range(1000, 1080)))
    below = [sum(terms) for terms in policy.costs(short, [a, b])]
    assert below[1] < below[0], "a match of 20% is below the threshold"
