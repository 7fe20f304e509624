"""`kvloom-lab bench routing` end to end on tiny traces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from lab.pages import write_table
from lab.study.command import study_command
from lab.study.page import render
from lab.study.plan import StudyPlan
from lab.study.results import StudyResults
from tests.unit.tools.simulate.small_traces import small_mooncake_trace, small_weka_trace
from tools.failures import CommandError
from tools.simulate.runs import RunReport
from tools.simulate.statistics import Slo, summarise
from tools.simulate.workload import SimulationResult


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    return small_mooncake_trace(tmp_path)


@pytest.fixture
def weka(tmp_path: Path) -> Path:
    return small_weka_trace(tmp_path)


def test_a_study_is_resumed_where_it_stopped(mooncake: Path, weka: Path, tmp_path: Path):
    """It runs for hours: what is finished is not done again, half a line from a crash is dropped, and the page keeps
    its prose."""
    plan = StudyPlan(str(mooncake), str(weka))
    page = tmp_path / "page.md"
    page.write_text("Before\n<!-- table: engine -->\nold\n<!-- end table -->\nAfter\n")
    arguments = ["--mooncake", str(mooncake), "--weka", str(weka), "--results", str(tmp_path / "r")]
    arguments += ["--page", str(page), "--only", "engine", "--jobs", "1"]
    first = CliRunner().invoke(study_command, arguments)
    assert first.exit_code == 0, first.output
    written = page.read_text()
    assert re.fullmatch(
        r"Before\n<!-- table: engine -->\n\|.*\|\n\| Mooncake, FCFS \| .*\n<!-- end table -->\nAfter\n",
        written,
        re.DOTALL,
    )
    results_file = tmp_path / "r" / "results.jsonl"
    kept = results_file.read_bytes()
    results_file.write_bytes(kept + b'{"key": "half')
    assert CliRunner().invoke(study_command, arguments).exit_code == 0
    assert (page.read_text(), results_file.read_bytes()) == (written, kept)
    table = plan.table("engine", None)
    assert len(kept.splitlines()) == len(table.jobs())
    assert render(table, StudyResults(tmp_path / "r")) in written


def test_results_of_another_trace_are_not_used(mooncake: Path, weka: Path, tmp_path: Path):
    """A table must be of the trace that it names."""
    plan = StudyPlan(str(mooncake), str(weka))
    table = plan.table("mooncake", None)
    results = StudyResults(tmp_path)
    job = table.jobs()[0]
    nothing = SimulationResult((), (), 0, 0)
    report = RunReport(summarise(nothing, num_shards=1, num_measured_calls=0, slo=Slo()))
    results.keep(job, report)
    assert StudyResults(tmp_path).find_run(job) == report
    mooncake.write_text(mooncake.read_text() + "\n")
    assert StudyResults(tmp_path).find_run(job) is None


def test_every_table_of_the_study_can_be_planned():
    """A name that --only offers must lead to simulations."""
    plan = StudyPlan("m", "w")
    for name in plan.names:
        assert plan.table(name, 3.0).jobs(), name


def test_a_page_without_the_markers_is_rejected(tmp_path: Path):
    """The page is checked before the simulations, and another table is never overwritten."""
    page = tmp_path / "page.md"
    page.write_text("<!-- table: a -->\n<!-- table: b -->\n<!-- end table -->\n")
    write_table(page, "b", "| x |")
    assert page.read_text() == "<!-- table: a -->\n<!-- table: b -->\n| x |\n<!-- end table -->\n"
    with pytest.raises(CommandError, match="table: a"):
        write_table(page, "a", "| x |")
