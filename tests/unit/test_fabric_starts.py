"""`make test` fails when it starts more fabrics than it may, in however many processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fabric_starts import MAX_STARTS

REPOSITORY = Path(__file__).resolve().parents[2]
STARTS = """
import pytest
from tests.fabric_starts import count_start

@pytest.mark.parametrize("number", range({count}))
def test_starts(number):
    count_start()
"""


@pytest.mark.parametrize(
    ("count", "expression", "num_processes", "status"),
    [
        (MAX_STARTS + 1, "not long", 0, 1),
        pytest.param(MAX_STARTS + 1, "not long", 2, 1, marks=pytest.mark.long),
        (MAX_STARTS, "not long", 0, 0),
        pytest.param(MAX_STARTS + 1, "long or not long", 0, 0, marks=pytest.mark.long),
    ],
)
def test_fabrics_are_counted_over_all_processes(
    tmp_path: Path, count: int, expression: str, num_processes: int, status: int
) -> None:
    """Each change would add one; `make test-long` may start more."""
    (tmp_path / "test_it.py").write_text(STARTS.format(count=count))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist.plugin",
        "-p",
        "tests.fabric_starts",
        "-n",
        str(num_processes),
        "-m",
        expression,
        ".",
    )
    done = subprocess.run(
        command, cwd=tmp_path, env=environment | {"PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    assert f"{count} fabrics were started" in done.stdout
    assert ("first by" in done.stdout) is (status == 1)
    assert done.stdout.count("::test_starts[") == (count if status else 0)
