"""The figures of a run, recomputed by hand."""

from __future__ import annotations

import pytest

from tools.simulate.statistics import Slo, Statistics, combine, quantile, summarise
from tools.simulate.workload import Call, Outcome, ShardSample, SimulationResult


def outcome(
    call_id: int,
    *,
    at: float | None = None,
    ttft: float = 1.0,
    prompt: int = 100,
    cached: int = 0,
    output: int = 1,
    decode: float = 0.0,
    shard: int = 0,
    failed: bool = False,
) -> Outcome:
    arrived_at = float(call_id) if at is None else at
    call = Call(call_id, prompt, output, ())
    return Outcome(call, arrived_at, shard, cached, ttft, arrived_at + ttft + decode, failed)


def summary(
    outcomes: list[Outcome], *, samples: tuple[ShardSample, ...] = (), num_shards: int = 2, measured: int = 10**6
) -> Statistics:
    result = SimulationResult(outcomes, samples, router_cpu_seconds=0.002, num_router_events=0)
    return summarise(result, num_shards=num_shards, num_measured_calls=measured, slo=Slo())


def test_the_first_tenth_by_arrival_is_warm_up():
    """It meets an empty fleet: its TTFT depends on the start, not on the policy. The order of ends must not matter."""
    outcomes = [outcome(index, ttft=100.0 if index < 2 else 1.0) for index in reversed(range(20))]
    found = summary(outcomes)
    assert found.requests == 18
    assert (found.ttft_mean, found.ttft_p99) == (1.0, 1.0)


def test_hit_rate_is_of_tokens_and_of_the_whole_run():
    """Long prompts count more than short ones; filling the caches is part of the price. Beside it the share without
    the warm-up."""
    outcomes = [outcome(0, prompt=1000)] + [outcome(index, prompt=100, cached=50) for index in range(1, 10)]
    found = summary(outcomes)
    assert found.hit_rate == pytest.approx(450 / 1900)
    assert found.warm_hit_rate == pytest.approx(0.5)


def test_quantiles_lie_between_values():
    """The usual definition, so that others' figures can be compared."""
    assert quantile([1, 2, 3, 4], 0.5) == 2.5
    assert quantile([0, 10], 0.9) == pytest.approx(9)
    assert quantile([7], 0.99) == 7
    assert quantile([], 0.5) is None


def test_goodput_requires_both_limits():
    """A quick first token with a crawling rest is no good answer, nor is the reverse; a failed one is none."""
    outcomes = [
        outcome(0, ttft=2.0, output=11, decode=1.0),
        outcome(1, ttft=2.1, output=11, decode=0.1),
        outcome(2, ttft=0.1, output=11, decode=1.1),
        outcome(3, ttft=0.1, failed=True),
    ]
    found = summary(outcomes)
    assert found.goodput == 0.25
    assert found.failed == 1
    assert found.tpot_mean == pytest.approx((0.1 + 0.01 + 0.11) / 3)


def test_answers_of_one_token_have_no_time_per_token():
    """A zero in the mean would flatter it."""
    assert summary([outcome(0, output=1), outcome(1, output=3, decode=0.2)]).tpot_mean == pytest.approx(0.1)
    assert summary([outcome(0, output=1)]).tpot_mean is None


def test_calls_after_the_measured_ones_do_not_count():
    """In a closed loop the users leave one by one at the end."""
    outcomes = [outcome(index, ttft=1.0 if index < 10 else 50.0) for index in range(12)]
    assert summary(outcomes, measured=10).ttft_mean == 1.0


def test_imbalance_of_work_compares_computed_tokens():
    """Cached tokens are no work."""
    outcomes = [outcome(0, prompt=100, cached=40), outcome(1, prompt=20, shard=1)]
    assert summary(outcomes).prefill_imbalance == pytest.approx(60 / 40)
    assert summary(outcomes, num_shards=4).prefill_imbalance == pytest.approx(60 / 20)


def test_imbalance_in_flight_is_a_mean_over_time():
    """What queues unevenly, moment by moment, within the time that counts; idle moments say nothing."""

    def sample(at: float, shard: int, running: int, waiting: int = 0) -> ShardSample:
        return ShardSample(at, shard, running, waiting, 0, 0)

    samples = (
        *(sample(1, 0, 3, 1), sample(1, 1, 0)),
        *(sample(2, 0, 2), sample(2, 1, 2)),
        *(sample(3, 0, 0), sample(3, 1, 0)),
        *(sample(99, 0, 9), sample(99, 1, 0)),
    )
    found = summary([outcome(0, at=0.5), outcome(1, at=50.0)], samples=samples)
    assert found.in_flight_imbalance == pytest.approx((2 + 1) / 2)


def test_when_everything_failed_there_are_no_times():
    """A run without an answer must be reported, not crash the report."""
    found = summary([outcome(0, failed=True), outcome(1, failed=True)])
    assert (found.ttft_mean, found.ttft_p50, found.tpot_mean, found.goodput) == (None, None, None, 0.0)
    assert summary([]).requests == 0


def test_router_time_is_per_request():
    """2 ms for two requests."""
    assert summary([outcome(0), outcome(1)]).router_microseconds == pytest.approx(1000)


def test_seeds_become_means_and_half_ranges():
    """One seed's luck must be told from a policy's worth."""
    one, other = summary([outcome(0, ttft=1.0)]), summary([outcome(0, ttft=2.0, failed=False)])
    row = combine("ect", [one, other])
    assert (row["policy"], row["seeds"], row["ttft_mean"], row["requests"]) == ("ect", 2, 1.5, 1)
    assert row["spread"]["ttft_mean"] == 0.5
    assert row["tpot_mean"] is None
    assert "spread" not in combine("ect", [one])
