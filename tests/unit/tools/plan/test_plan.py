"""Plans on paper: what each resource needs, the search for the simulator's smallest fleet, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tools.failures import CommandError
from tools.plan.command import plan
from tools.plan.demand import PlannedLoad, measured_demand, parse_targets, write_trace
from tools.plan.estimate import estimate, load_of_shard
from tools.plan.search import MAX_SIMULATED, smallest_fleet
from tools.simulate.bound import simulate_bound
from tools.simulate.fleet.fleet import ModelFleet
from tools.simulate.fleet.profile import PROFILES
from tools.simulate.statistics import Slo
from tools.simulate.traces import read_trace

PROFILE = PROFILES["8b"]
SLO = Slo(2.0, 0.1)
demands = st.builds(
    PlannedLoad,
    requests_per_second=st.floats(0.1, 1e3),
    prompt_tokens=st.floats(1, 20_000),
    output_tokens=st.floats(1, 2_000),
    cached_share=st.floats(0, 0.99),
)


def demand(rate: float = 100.0, prompt: float = 1500.0, output: float = 300.0, cached: float = 0.5) -> PlannedLoad:
    return PlannedLoad(requests_per_second=rate, prompt_tokens=prompt, output_tokens=output, cached_share=cached)


@given(load=demands)
def test_a_fleet_keeps_the_objective_on_paper_and_one_shard_less_does_not(load: PlannedLoad) -> None:
    """It is the smallest one, and each resource has its headroom."""
    found = estimate(load, PROFILE, SLO, headroom=0.15)
    assert found.num_shards == max(found.by_resource.values())
    bears = found.load
    assert bears.prefill_share <= 0.85
    assert bears.tpot_seconds <= SLO.tpot_seconds
    assert bears.ttft_seconds <= SLO.ttft_seconds
    assert bears.kv_share <= 0.85
    if found.num_shards > 1:
        less = load_of_shard(load, PROFILE, found.num_shards - 1)
        assert (
            less.prefill_share > 0.85
            or less.ttft_seconds > SLO.ttft_seconds
            or less.tpot_seconds > 0.085
            or less.kv_share > 0.85
            or less.num_sequences > 0.85 * PROFILE.max_batch
        )


@given(load=demands, factor=st.floats(1, 50))
def test_more_load_never_needs_fewer_shards(load: PlannedLoad, factor: float) -> None:
    """And many times the load needs no more than as many fleets side by side."""
    scaled = PlannedLoad(
        requests_per_second=load.requests_per_second * factor,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        cached_share=load.cached_share,
    )
    one, many = (estimate(each, PROFILE, SLO, 0.15).num_shards for each in (load, scaled))
    assert one <= many <= math.ceil(factor) * one


def test_stated_streams_are_a_floor() -> None:
    """100,000 conversations at a time need their KV, however slowly they speak."""
    text = "streams=100000,tokens_per_second=1000,prompt=4000,output=400,cached=0"
    found = estimate(parse_targets(text), PROFILE, SLO, 0.15)
    assert found.by_resource["batch"] >= 100_000 / PROFILE.max_batch
    assert found.by_resource["memory"] >= 100_000 * 4_200 / PROFILE.capacity_tokens
    assert found.binding == "memory"


def test_what_no_fleet_can_do_is_said() -> None:
    """A prompt that takes longer than the objective is no matter of the number of shards."""
    with pytest.raises(CommandError, match="one request alone takes too long"):
        estimate(demand(prompt=1e6, cached=0.0), PROFILE, SLO, 0.15)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt=10", "output"),
        ("prompt=10,output=5", "requests_per_second"),
        ("prompt=10,output=5,speed=3", "'speed'"),
        ("prompt=ten,output=5,requests_per_second=1", "'ten' is no number"),
        ("prompt=10,output=5,requests_per_second=1,cached=1", "cached"),
        ("prompt=nan,output=5,requests_per_second=1", "nan"),
    ],
)
def test_a_target_that_makes_no_sense_is_named(text: str, said: str) -> None:
    """A typing mistake must not become a fleet."""
    with pytest.raises(CommandError, match=said):
        parse_targets(text)


@given(needed=st.integers(1, MAX_SIMULATED), start=st.integers(1, MAX_SIMULATED))
def test_the_search_finds_the_smallest_fleet_from_any_start(needed: int, start: int) -> None:
    """In few simulations, each of which takes seconds."""
    asked: list[int] = []

    def goodput_at(count: int) -> float:
        asked.append(count)
        return 1.0 if count >= needed else 0.0

    assert smallest_fleet(goodput_at, start) == (needed, 1.0)
    assert len(asked) == len(set(asked)) <= 20


def test_a_fleet_that_never_suffices_is_an_error() -> None:
    """The simulator stops at some size."""
    with pytest.raises(CommandError, match="goodput of 50%"):
        smallest_fleet(lambda _: 0.5, 3)


def test_a_synthetic_trace_has_the_averages_that_it_was_made_from(tmp_path: Path) -> None:
    """The check of stated targets is of that load, not of another one."""
    wanted = demand(rate=20.0, prompt=4096.0, output=200.0, cached=0.5)
    write_trace(tmp_path / "t.jsonl", wanted, 3000, seed=1)
    trace = read_trace(tmp_path / "t.jsonl", "mooncake")
    result = simulate_bound(trace.workload(1.0, 0, None), [ModelFleet(name="m", num_shards=64, profile=PROFILE)])
    found = measured_demand(result.outcomes, PROFILE)
    assert found.requests_per_second == pytest.approx(20.0, rel=0.1)
    assert found.prompt_tokens == pytest.approx(4096.0, rel=0.1)
    assert found.output_tokens == pytest.approx(200.0, rel=0.1)
    assert found.cached_share == pytest.approx(0.5, abs=0.08)


def test_the_command_prints_the_estimate_the_simulation_and_the_cost() -> None:
    """As people and as programs read it."""
    arguments = ["--targets", "requests_per_second=4,prompt=2000,output=50,cached=0.5", "--profile", "8b"]
    done = CliRunner().invoke(plan, [*arguments, "--price", "2.5", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["estimate"]["shards"] == 1
    assert report["simulated"]["shards"] == 1
    assert report["simulated"]["goodput"] >= 0.9
    assert report["cost"]["per_hour"] == 2.5
    assert report["cost"]["per_million_output_tokens"] == pytest.approx(2.5 / (4 * 50 * 3600) * 1e6)
    text = CliRunner().invoke(plan, [*arguments, "--no-check"]).stdout
    assert "on paper: 1 shards" in text
    assert "simulated" not in text


def test_the_command_wants_a_load() -> None:
    """And says which it takes."""
    done = CliRunner().invoke(plan, [])
    assert done.exit_code == 2
    assert "--trace or --targets" in done.output
