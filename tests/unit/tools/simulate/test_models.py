"""Fleets of several models: each call runs on a shard of its model, as if the model had a fleet of its own."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from router.core.placement import POLICIES
from tests.fakes.sim_calls import ListedWorkload, conversations
from tests.unit.tools.simulate.test_world import PROFILE
from tools.failures import CommandError
from tools.simulate.bound import simulate_bound
from tools.simulate.fleet.fleet import FleetOptions, ModelFleet
from tools.simulate.fleet.models_option import parse_models, parse_shares
from tools.simulate.statistics import Slo, summarise_models
from tools.simulate.traces.models import ModelWorkload
from tools.simulate.traces.open_loop import OpenLoopWorkload
from tools.simulate.workload import Call, Outcome
from tools.simulate.world import simulate

SLOWER = msgspec.structs.replace(PROFILE, name="slower", step_floor_seconds=0.03, max_batch=2)
MODELS = (
    ModelFleet(name="a", num_shards=3, profile=PROFILE),
    ModelFleet(name="b", num_shards=2, profile=SLOWER, capacity_blocks=90),
)
EVERY_POLICY = [
    pytest.param(policy, marks=() if policy in ("ect", "session_hash") else pytest.mark.long) for policy in POLICIES
]
SHARDS_OF = {"a": range(3), "b": range(3, 5)}


def shared_workload(calls_per_second: float = 9.0) -> ModelWorkload:
    calls = [*conversations(16, 12, block_size=16, calls_per_second=calls_per_second).first_calls()]
    return ModelWorkload(OpenLoopWorkload(16, calls), ["a", "b"], (3, 2))


def only(model: str) -> ListedWorkload:
    return ListedWorkload([(at, call) for at, call in shared_workload().first_calls() if call.model == model], 16)


def placements(outcomes: Sequence[Outcome], first_shard: int) -> dict[int, tuple[object, ...]]:
    return {
        one.call.call_id: (
            one.shard_index - first_shard,
            one.num_cached_tokens,
            round(one.ttft_seconds, 9),
            round(one.finished_at, 9),
        )
        for one in outcomes
    }


def fleet(*models: ModelFleet, policy: str, **changes: Any) -> FleetOptions:
    num_shards = sum(model.num_shards for model in models)
    return FleetOptions(profile=PROFILE, num_shards=num_shards, models=models, policy=policy, **changes)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_model_in_a_shared_fleet_is_placed_as_in_a_fleet_of_its_own(policy: str) -> None:
    """Models share routers and nothing else: the queue, the load and the cache of one say nothing about another.
    (Reports come at fixed times here. Without staleness they come with every arrival, also of another model.)"""
    shared = simulate(shared_workload(), fleet(*MODELS, policy=policy, staleness_seconds=0.05)).outcomes
    for model in MODELS:
        alone = simulate(only(model.name), fleet(model, policy=policy, staleness_seconds=0.05)).outcomes
        mine = [one for one in shared if one.call.model == model.name]
        assert len(mine) > 40
        assert placements(mine, SHARDS_OF[model.name].start) == placements(alone, 0)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_every_call_runs_on_a_shard_of_its_model(policy: str) -> None:
    """Whatever the policy, and also in the bound: another model's shard could not answer."""
    options = fleet(*MODELS, policy=policy, num_routers=2)
    for result in (simulate(shared_workload(), options), simulate_bound(shared_workload(), MODELS)):
        for outcome in result.outcomes:
            assert not outcome.failed
            assert outcome.shard_index in SHARDS_OF[outcome.call.model]
        by_model = summarise_models(result, MODELS, num_measured_calls=len(result.outcomes), slo=Slo())
        counts = Counter(outcome.call.model for outcome in result.outcomes)
        assert {name: one.requests for name, one in by_model.items()} == {
            name: count - count // 10 for name, count in counts.items()
        }


def test_sessions_are_divided_as_the_shares_say_and_stay_together() -> None:
    """A conversation whose turns went to two models would hit neither cache."""
    calls = [(float(i), Call(i, 100, 5, (1, 2), session_key=f"s{i % 500}")) for i in range(2000)]
    workload = ModelWorkload(OpenLoopWorkload(16, calls), ["a", "b", "c"], (1, 2, 1))
    assigned = [call for _, call in workload.first_calls()]
    models_of = {call.session_key: call.model for call in assigned}
    assert all(models_of[call.session_key] == call.model for call in assigned)
    counts = Counter(models_of.values())
    assert counts["b"] == pytest.approx(250, abs=40)
    assert counts["a"] == pytest.approx(125, abs=40)
    hashes = {call.model: tuple(call.block_hashes) for call in assigned}
    assert len(set().union(*hashes.values())) == 6, "blocks of different models are different"


def test_the_models_that_a_trace_names_are_used() -> None:
    """Without shares the trace decides, and an unknown model is an error that names the call."""
    calls = [(0.0, Call(0, 100, 5, (), model="b")), (1.0, Call(1, 100, 5, (), model="c"))]
    workload = ModelWorkload(OpenLoopWorkload(16, calls[:1]), ["a", "b"])
    (first,) = workload.first_calls()
    assert first[1].model == "b"
    with pytest.raises(CommandError, match="call 1 of the trace is one of the model 'c'; --model-shares"):
        ModelWorkload(OpenLoopWorkload(16, calls), ["a", "b"]).first_calls()
    unnamed = dataclasses.replace(calls[0][1], model="")
    with pytest.raises(CommandError, match="names no model"):
        ModelWorkload(OpenLoopWorkload(16, [(0.0, unnamed)]), ["a", "b"]).first_calls()


def test_each_model_has_its_shards_and_its_profile() -> None:
    """As the options say."""
    a, b = parse_models("a=4, org/b:v1=2", "a=70b,org/b:v1=8b", None)
    assert (a.name, a.num_shards, a.profile.name) == ("a", 4, "70b")
    assert (b.name, b.num_shards, b.profile.name) == ("org/b:v1", 2, "8b")
    assert [model.profile.name for model in parse_models("a=1,b=1", "8b", 100)] == ["8b", "8b"]
    assert parse_shares("org/b:v1=1,a=3", (a, b)) == (3.0, 1.0)


@pytest.mark.parametrize(
    ("models", "profile", "problem"),
    [
        ("a=1", "8b", "expected 2 to"),
        ("a=1,a=2", "8b", "each model once"),
        ("a=1,b", "8b", "MODEL=VALUE"),
        ("a=1,b=0", "8b", "no number of shards"),
        ("a=1,b=x", "8b", "no number of shards"),
        ("a=4000,b=4000", "8b", "more than 4096"),
        ("a=1,b=1", "a=8b", "one for each of the models a, b"),
    ],
)
def test_bad_models_are_named(models: str, profile: str, problem: str) -> None:
    """A typing mistake must not simulate another fleet."""
    with pytest.raises(CommandError, match=problem):
        parse_models(models, profile, None)


@pytest.mark.parametrize("shares", ["a=1", "a=1,b=x", "a=1,b=0", "a=1,b=nan"])
def test_bad_shares_are_named(shares: str) -> None:
    """Likewise."""
    with pytest.raises(CommandError, match="--model-shares"):
        parse_shares(shares, MODELS)
