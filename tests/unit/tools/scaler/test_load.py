"""The load of a model from what routers say."""

from __future__ import annotations

import pytest

from kvloom.v1.overview_pb2 import GetOverviewResponse, QueueOverview, ShardOverview
from tools.scaler.load import TPOT_METRIC, TTFT_METRIC, FleetReading, RouterAnswer, latencies_in, loads_of, quantile


def shard(name: str, **fields) -> ShardOverview:
    settings = {"model": "m", "num_blocks": 100, "num_available_blocks": 50, "max_batch": 10} | fields
    return ShardOverview(shard_id=name, prefill_tokens_per_second=1000.0, **settings)


def reading(at: float, *routers: GetOverviewResponse, text: str = "", incarnation: str = "1") -> FleetReading:
    return FleetReading(at, [RouterAnswer(one, latencies_in(text), incarnation + one.router_id) for one in routers])


def test_shards_count_once_and_queues_add_up() -> None:
    """Every router sees all shards, and each has a queue of its own."""
    shards = [
        shard("a", num_running=5, num_queued_prefill_tokens=30),
        shard("b", num_waiting=2),
        shard("c", asleep=True),
    ]
    queue = QueueOverview(model="m", num_requests=3, num_prompt_tokens=70)
    routers = [GetOverviewResponse(router_id=name, shards=shards, queues=[queue]) for name in "xy"]
    only = loads_of(reading(0.0, *routers), None)["m"]
    assert (only.num_shards, only.kv_usage, only.batch_share) == (2, 0.5, 0.25)
    assert (only.num_queued_requests, only.num_queued_prefill_tokens) == (8, 170)
    assert only.queued_seconds == pytest.approx(0.085)
    assert only.ttft_seconds is None


def test_rates_are_those_between_two_readings() -> None:
    """Cached tokens cost nothing, and a shard that was restarted has counted from zero."""
    before = [shard("a", num_prompt_tokens=1000, num_cached_tokens=100), shard("b", num_prompt_tokens=9000)]
    after = [shard("a", num_prompt_tokens=2000, num_cached_tokens=500), shard("b", num_prompt_tokens=10)]
    two = [reading(at, GetOverviewResponse(shards=shards)) for at, shards in ((0.0, before), (10.0, after))]
    assert loads_of(two[1], two[0])["m"].computed_tokens_per_second == 60.0


def test_latencies_are_those_of_requests_that_ended_in_between() -> None:
    """A slow hour that is over must not keep a fleet large."""

    def text(fast: int, slow: int) -> str:
        rows = [("0.5", fast), ("5", fast + slow), ("+Inf", fast + slow)]
        lines = [f'{TTFT_METRIC}_bucket{{model="m",priority_class="",le="{le}"}} {count}' for le, count in rows]
        return "\n".join([f"# TYPE {TTFT_METRIC} histogram", *lines, ""])

    router = GetOverviewResponse(router_id="x", shards=[shard("a")])
    slow, fast = reading(0.0, router, text=text(0, 100)), reading(60.0, router, text=text(200, 100))
    assert loads_of(fast, slow)["m"].ttft_seconds == pytest.approx(0.45)
    assert loads_of(fast, slow)["m"].tpot_seconds is None
    restarted = reading(60.0, router, text=text(10, 0), incarnation="2")
    assert loads_of(restarted, slow)["m"].ttft_seconds == pytest.approx(0.45)
    assert latencies_in("") == {TTFT_METRIC: {}, TPOT_METRIC: {}}


def test_what_lies_above_all_bounds_counts_as_the_last_one() -> None:
    """Infinity would ask for the largest fleet whatever the objective is."""
    assert quantile([(1.0, 0.0), (2.0, 5.0), (float("inf"), 100.0)], 0.9) == 2.0
    assert quantile([(1.0, 0.0), (float("inf"), 0.0)], 0.9) is None
