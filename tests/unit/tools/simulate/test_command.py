"""`kvloom simulate` end to end on tiny traces."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from router.core.placement import POLICIES
from tests.unit.tools.simulate.small_traces import small_mooncake_trace, small_weka_trace
from tests.unit.tools.simulate.test_traces import session, turn, write_lines
from tools.failures import CommandError
from tools.simulate.command import simulate_command
from tools.simulate.fleet.profile import PROFILES, load_profile
from tools.simulate.fleet.step_time import decode_run
from tools.simulate.plot import draw, shown_places
from tools.simulate.runs import Curves
from tools.simulate.statistics import Slo, combine, summarise
from tools.simulate.table import print_table
from tools.simulate.workload import SimulationResult

FIELDS = {
    *("policy", "hit_rate", "ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99", "tpot_mean", "goodput", "requests"),
    *("failed", "prefill_imbalance", "in_flight_imbalance", "router_microseconds", "seeds"),
}


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    return small_mooncake_trace(tmp_path)


@pytest.fixture
def weka(tmp_path: Path) -> Path:
    return small_weka_trace(tmp_path)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(simulate_command, [*map(str, arguments), "--jobs", "1"])


def rows(*arguments: str | Path) -> list[dict[str, Any]]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_all_policies_and_the_bound_in_json(mooncake: Path):
    """What other programs read: a row for each policy, in seconds and shares; nothing beats the bound's hit rate."""
    found = rows("--trace", mooncake, "--shards", "3", "--policy", "all")
    assert [row["policy"] for row in found] == [*POLICIES, "pool", "bound"]
    for row in found:
        assert row.keys() >= FIELDS
        assert 0 <= row["hit_rate"] <= found[-1]["hit_rate"]
        assert row["requests"] == 108
        assert row["failed"] == 0
        assert 0 < row["ttft_p50"] <= row["ttft_p90"] <= row["ttft_p99"]


def test_the_calibration_of_predictions_is_reported(mooncake: Path):
    """Each policy's row says how well the router foresaw what happened; on a fleet that obeys its own model it foresees
    most. The bounds predict nothing."""
    ect, pool, bound = rows("--trace", mooncake, "--shards", "3")
    assert pool["calibration"] == bound["calibration"] == {}
    assert ect["calibration"].keys() == {"waiting", "prefill", "ttft", "decoding", "end"}
    ttft = ect["calibration"]["ttft"]
    assert 0 < ttft["num_predictions"] <= 108
    assert ttft["share_within_25_percent"] > 0.5
    assert len(ttft["deciles"]) == 10
    assert ttft["deciles"][0]["actual_seconds"] < ttft["deciles"][-1]["actual_seconds"]
    table = invoke("--trace", mooncake, "--shards", "3").stdout
    assert "predictions against what happened" in table
    assert "decoding" in table


def test_the_same_seed_gives_the_same_figures(mooncake: Path):
    """A figure that cannot be reproduced proves nothing. Only the CPU time of the router depends on the machine."""

    def figures(seed: str) -> list[dict[str, Any]]:
        found = rows("--trace", mooncake, "--shards", "2", "--policy", "ect,round_robin", "--seed", seed)
        return [{**row, "router_microseconds": 0} for row in found]

    assert figures("3") == figures("3") != figures("4")


def test_several_seeds_in_processes_of_their_own(mooncake: Path):
    """Means with spread, whichever process finishes first."""
    arguments = ["--trace", mooncake, "--shards", "2", "--policy", "least_requests", "--seeds", "2", "--json"]
    result = CliRunner().invoke(simulate_command, [*map(str, arguments), "--jobs", "2"])
    assert result.exit_code == 0, result.output
    (row, _, _) = json.loads(result.stdout)
    singles = [rows(*arguments[:-3], "--seed", str(seed))[0]["ttft_mean"] for seed in (0, 1)]
    assert row["ttft_mean"] == pytest.approx(sum(singles) / 2)
    assert row["spread"]["ttft_mean"] == pytest.approx(abs(singles[0] - singles[1]) / 2)


def test_a_closed_loop_has_users(weka: Path):
    """Weka's traces: sessions hit their own prefixes."""
    ect, pool, bound = rows("--trace", weka, "--users", "3", "--shards", "2")
    assert ect["requests"] == pool["requests"] == 18
    assert ect["ttft_of_pool"] == pytest.approx(ect["ttft_mean"] / pool["ttft_mean"])
    assert ect["ttft_of_pool"] >= 1
    assert 0.3 < ect["hit_rate"] <= bound["hit_rate"]


def test_every_option_of_the_fleet_has_an_effect(mooncake: Path):
    """Each of these flags must change the figures or have another visible effect."""
    base = ["--trace", mooncake, "--shards", "2", "--rate", "8", "--policy", "gaie"]

    def ttft(*flags: str) -> float:
        return rows(*base, *flags)[0]["ttft_mean"]

    plain = ttft()
    for flags in (
        ("--capacity-blocks", "60"),
        ("--staleness", "2"),
        ("--routers", "2"),
        ("--speed-factors", "1,3"),
        ("--profile", "8b"),
        ("--max-requests", "60"),
    ):
        assert ttft(*flags) != plain, flags
    assert rows(*base, "--slo-ttft", "0.001")[0]["goodput"] == 0
    ttft("--engine-order", "shortest_prefill", "--peer-fetch", "100")


def test_capacity_is_a_rate_that_is_sustained(mooncake: Path):
    """The row shows the figures at that rate."""
    flags = ["--trace", mooncake, "--shards", "2", "--policy", "least_requests", "--capacity"]
    row, bound = rows(*flags)
    assert row["load_unit"] == "rate"
    assert row["goodput"] >= 0.9
    at_capacity = rows(
        "--trace", mooncake, "--shards", "2", "--policy", "least_requests", "--rate", str(row["capacity"])
    )
    assert at_capacity[0]["goodput"] == row["goodput"]
    assert bound["capacity"] > row["capacity"] / 2


def test_the_table_has_one_line_per_policy(mooncake: Path):
    """Without --json: one line for each policy, and nothing but the table."""
    result = invoke("--trace", mooncake, "--shards", "2", "--policy", "round_robin")
    assert result.exit_code == 0
    assert re.search(r"^round_robin +\d+\.\d%", result.stdout, re.MULTILINE)
    assert re.search(r"^bound", result.stdout, re.MULTILINE)
    assert not result.stderr


def test_several_models_have_rows_of_their_own(mooncake: Path):
    """Which of them suffers is not visible in the total."""
    flags = ("--trace", mooncake, "--models", "big=3,small=1", "--model-shares", "small=1,big=3")
    flags += ("--profile", "big=70b,small=8b")
    for row in rows(*flags, "--policy", "ect"):
        assert list(row["models"]) == ["big", "small"]
        assert row["requests"] == 108
        counts = [one["requests"] for one in row["models"].values()]
        assert counts[0] > counts[1] > 0
        assert row["models"]["small"]["ttft_mean"] < row["models"]["big"]["ttft_mean"]
    shown = invoke(*flags, "--policy", "round_robin", "--seeds", "2")
    assert "big: 3 × 70b, small: 1 × 8b" in shown.stdout
    assert re.search(
        r"^round_robin .*\n  big .*\n  small .*\npool .*\n  big .*\n  small .*\nbound .*\n  big",
        shown.stdout,
        re.MULTILINE,
    )
    assert invoke(*flags, "--policy", "ect", "--capacity").exit_code == 0


def test_a_trace_may_name_the_models(tmp_path: Path):
    """In every format; a fleet of one model serves them all, as if they were not named."""
    turns = [turn(0, list(range(1, 40))) | {"model": "x"}, turn(9, list(range(1, 60))) | {"model": "y"}]
    line = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1]}
    traces = [
        write_lines(tmp_path / "weka.jsonl", [session(turns)] * 20),
        write_lines(tmp_path / "mooncake.jsonl", [line | {"timestamp": n, "model": "xy"[n % 2]} for n in range(40)]),
        tmp_path / "azure.csv",
    ]
    lines = [f"2024-05-10 00:00:{n:02}.0000000,600,5,{'xy'[n % 2]}" for n in range(40)]
    traces[2].write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens,Model", *lines]) + "\n")
    for trace in traces:
        load = ("--users", "2") if "weka" in trace.name else ()
        by_model = rows("--trace", trace, *load, "--models", "x=1,y=1")[0]["models"]
        assert by_model["x"]["requests"] == pytest.approx(18, abs=2)
        assert by_model["y"]["requests"] == pytest.approx(18, abs=2)
        (row, _, _) = rows("--trace", trace, *load, "--shards", "2")
        assert "models" not in row


def test_a_narrow_terminal_gets_fewer_columns():
    """Cut-off figures are worse than none."""
    nothing = SimulationResult((), (), 0, 0)
    row = combine("ect", [summarise(nothing, num_shards=1, num_measured_calls=0, slo=Slo())])
    row |= {"ttft_mean": 1.5, "spread": {"ttft_mean": 0.25}}
    for width, shown, hidden in ((60, "goodput", "router"), (200, "router", "failed")):
        output = io.StringIO()
        print_table([row], "title", Console(file=output, width=width))
        assert shown in output.getvalue()
        assert hidden not in output.getvalue()
        assert "1.500 ±0.250" in output.getvalue()
        assert "…" not in output.getvalue()


@pytest.mark.parametrize("suffix", ["svg", pytest.param("png", marks=pytest.mark.long)])
def test_a_plot_is_drawn(mooncake: Path, tmp_path: Path, suffix: str):
    """TTFT distributions and timelines, in a file that other programs open."""
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{suffix}"
    rows("--trace", mooncake, "--shards", "2", "--policy", "ect", "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


@pytest.mark.parametrize("count", [1, 2, 250, 251, 474, 100_000])
def test_a_distribution_is_drawn_to_its_end(count: int):
    """A curve that stops before the slowest requests hides them."""
    places = shown_places(count)
    assert len(places) == len(set(places)) == min(count, 250)
    assert 0 <= places[0] <= count // 250
    assert places[-1] == count - 1


def test_equal_figures_are_drawn_in_equal_bytes(tmp_path: Path):
    """Plots that the documentation shows change only when what they show has changed."""
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for path in paths:
        draw(path, {"ect": Curves([0.1, 0.2, 0.4], [])}, "TTFT")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert b"<dc:date>" not in paths[0].read_bytes()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--policy", "best"), "no such policy"),
        (("--users", "3"), "--users is for weka"),
        (("--profile", "9b"), "--profile 9b"),
        (("--plot", "plot.gif"), r"\.svg or \.png"),
        (("--plot", "nowhere/plot.svg"), "no such directory"),
        (("--speed-factors", "1"), "expected 8"),
        (("--speed-factors", "1,x"), "not numbers"),
        (("--block-size", "16"), "--block-size is for azure"),
        (("--format", "weka"), "line 1: "),
        (("--format", "weka", "--rate", "2"), "--rate is for mooncake"),
        (("--models", "a=1"), "expected 2 to 256 models"),
        (("--models", "a=1,b=1", "--shards", "3"), "--shards is for one model"),
        (("--models", "a=1,b=1"), "names no model; --model-shares"),
        (("--model-shares", "a=1"), "give --models"),
        (("--profile", "a=8b"), "--profile a=8b"),
    ],
)
def test_wrong_use_is_one_line(mooncake: Path, flags: tuple[str, ...], problem: str):
    """Never a stack trace."""
    result = invoke("--trace", mooncake, *flags)
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit)
    assert re.search(problem, result.output)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(("num_sequences", "milliseconds"), [(1, 7.4), (32, 8.9), (128, 13.6), (256, 22.0)])
def test_the_profile_of_an_h100_has_its_measured_steps(num_sequences: int, milliseconds: float):
    """The figures of docs/how-to/gpu.md: planning with it is planning with the machine, not with a data sheet."""
    run = decode_run(load_profile("8b-h100"), num_sequences, 510 * num_sequences, 1.0)
    assert 1000 * run.first_seconds == pytest.approx(milliseconds, rel=0.05)


def test_a_profile_comes_from_a_file(tmp_path: Path):
    """Other models and machines, as JSON or TOML; a wrong key is named."""
    path = tmp_path / "p.json"
    path.write_bytes(msgspec.json.encode(PROFILES["8b"]))
    assert load_profile(str(path)) == PROFILES["8b"]
    path = tmp_path / "p.toml"
    fields = msgspec.to_builtins(PROFILES["8b"]).items()
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in fields))
    assert load_profile(str(path)) == PROFILES["8b"]
    path.write_text("name = 'x'\nspeed = 3\n")
    with pytest.raises(CommandError, match=r"p\.toml: .*speed"):
        load_profile(str(path))
