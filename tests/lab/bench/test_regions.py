"""`kvloom-lab bench regions`: several modelled cells with the real router core and the edges' real policy."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from lab.bench.autoscaling import SMALL_GPU
from lab.bench.region_model import RegionPlan, Regions, busiest_at, by_cost, in_turn, own_first, round_trips
from lab.bench.regions import RULES, bench_regions, run_rule

PLAN = RegionPlan(
    num_cells=3,
    num_shards=1,
    peak_rate=0.5,
    resident_share=0.3,
    day_seconds=120.0,
    loss_seconds=0.0,
    profile=SMALL_GPU,
    seed=1,
)
OTHER_RULES = sorted(RULES.keys() - {"kvloom"})
LOSS = msgspec.structs.replace(PLAN, loss_seconds=30.0)


def regions(plan: RegionPlan, rule: Any) -> Regions:
    found = Regions(plan, rule)
    found.run()
    return found


def test_a_run_is_a_function_of_its_plan() -> None:
    """Rules are compared on the same conversations, as far as what is asked does not depend on answers."""
    first, second = (run_rule("kvloom", LOSS, 2.0) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("plan", [PLAN, LOSS], ids=["calm", "loss"])
@pytest.mark.parametrize("rule", ["kvloom", *(pytest.param(rule, marks=pytest.mark.long) for rule in OTHER_RULES)])
def test_every_request_ends_once_and_residents_stay(rule: str, plan: RegionPlan) -> None:
    """Whatever rule holds, and whether or not a cell is lost: what was begun is answered, or refused for its
    residency."""
    turns = regions(plan, RULES[rule]).turns
    assert len({id(turn) for turn in turns}) == len(turns) > 50
    assert all(turn.cell == turn.origin for turn in turns if turn.is_resident)
    assert all(turn.is_resident for turn in turns if turn.is_refused)
    assert not any(turn.is_refused for turn in turns if plan is PLAN)


def test_answers_of_a_lost_cell_go_on_in_another() -> None:
    """They are asked again for what is missing, so that no token is counted twice."""
    turns = regions(LOSS, by_cost).turns
    moved = [turn for turn in turns if turn.num_moves and not turn.is_refused]
    assert moved
    begun = [turn for turn in moved if turn.num_received]
    assert begun
    assert all(turn.num_received < turn.num_output_tokens for turn in begun)
    assert all(turn.pause_seconds is not None and turn.pause_seconds > 0.0 for turn in moved)
    refused = [turn for turn in turns if turn.is_refused]
    assert {turn.origin for turn in refused} == {0}


def test_distance_counts() -> None:
    """A request that is sent away pays the way there and back, so that a rule that ignores it is slower."""
    ways = round_trips(3)
    assert all(ways[one][one] < 0.002 for one in range(3))
    assert ways[0][1] == pytest.approx(ways[1][0])
    assert 0.05 < ways[0][1] < 0.15  # Virginia and Dublin
    quiet = msgspec.structs.replace(PLAN, peak_rate=0.05, resident_share=0.0)
    near, far = (
        sorted(turn.ttft_seconds or 0.0 for turn in regions(quiet, rule).turns) for rule in (own_first, in_turn)
    )
    assert near[len(near) // 2] + 0.02 < far[len(far) // 2]
    assert [round(busiest_at(PLAN, cell) / PLAN.day_seconds, 2) for cell in range(2)] == [0.72, 0.52]


@pytest.mark.long
def test_the_command_prints_both_tables() -> None:
    """The page has what it prints."""
    args = ["--cells", "2", "--shards", "1", "--day-seconds", "120", "--loss-seconds", "20", "--peak-rate", "0.3"]
    done = CliRunner().invoke(bench_regions, [*args, "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["is_lost"] for row in rows] == [False] * len(RULES) + [True] * len(RULES)
    assert "2 cells" in CliRunner().invoke(bench_regions, args).stdout
