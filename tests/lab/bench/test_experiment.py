"""What all benches share: flags with their variables, the table, JSON and the page, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from lab.bench.experiment import Column, Report, TableOf, experiment
from lab.flags import choice, count, number, switch

ROWS = [{"case": "alone", "share": 0.5, "rest": None}, {"case": "beside", "share": 0.25, "rest": 3}]
COLUMNS = (Column("case", "case", is_left=True), Column("share", "share", ".0%"), Column("rest", "rest", unit=" s"))


def make(*, is_right: bool = True, runs: list[dict[str, object]] | None = None):
    @experiment(
        "some-thing",
        choice("--engine", ["a", "b"], "a", "What computes."),
        count("--shards", 2, most=4, to="num_shards"),
        number("--load", None, "A share.", most=1),
        switch("--fast", "Less."),
        page="the table",
    )
    def bench_some_thing(**settings: object) -> Report:
        """Measure something."""
        if runs is not None:
            runs.append(settings)
        return Report(
            ROWS,
            ["about", TableOf(COLUMNS, ROWS, "Shares")],
            for_page=("shares", "| new |"),
            is_right=is_right,
        )

    return bench_some_thing


def test_flags_have_their_own_variables_and_bounds() -> None:
    """The variable of one bench must not set another one's flag."""
    runs: list[dict[str, object]] = []
    command = make(runs=runs)
    environment = {"KVLOOM_BENCH_SOME_THING_SHARDS": "3", "KVLOOM_SHARDS": "4"}
    assert CliRunner().invoke(command, ["--load", "0.5", "--json"], env=environment).exit_code == 0
    assert runs == [{"engine": "a", "num_shards": 3, "load": 0.5, "fast": False}]
    for wrong in (("--shards", "5"), ("--load", "1.5"), ("--engine", "c")):
        assert CliRunner().invoke(command, wrong).exit_code == 2
    assert command.help == "Measure something."


def test_json_is_the_data_and_nothing_else() -> None:
    """Programs read it."""
    done = CliRunner().invoke(make(), ["--json"])
    assert json.loads(done.stdout) == ROWS


def test_a_table_shows_every_cell() -> None:
    """A value that is missing is a dash, and neither nothing nor an error."""
    done = CliRunner().invoke(make(), [])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("about\n")
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in done.stdout.splitlines() if "│" in line]
    assert lines == [["alone", "50%", "-"], ["beside", "25%", "3 s"]]


def test_what_must_not_happen_is_an_exit_status() -> None:
    """Scripts look at nothing else; the report is shown all the same."""
    done = CliRunner().invoke(make(is_right=False), [])
    assert done.exit_code == 1
    assert "Shares" in done.stdout


def test_a_table_takes_its_place_in_a_page(tmp_path: Path) -> None:
    """Figures in the documentation are those of a run, between the markers and nowhere else."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: shares -->\nold\n<!-- end table -->\nbehind\n")
    assert CliRunner().invoke(make(), ["--page", str(page)]).exit_code == 0
    assert page.read_text() == "before\n<!-- table: shares -->\n| new |\n<!-- end table -->\nbehind\n"
    page.write_text("nothing")
    assert CliRunner().invoke(make(), ["--page", str(page)]).exit_code == 1
    assert page.read_text() == "nothing"
