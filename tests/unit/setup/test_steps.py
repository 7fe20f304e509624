"""A set-up is interrupted, and started twice at the same time, by people who are in a hurry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from setup.steps import Steps, fingerprint
from tests.conftest import REPOSITORY

HOLDS_THE_LOCK = """
import sys
from pathlib import Path
from setup.steps import only_one

with only_one(Path(sys.argv[1])):
    print("inside", flush=True)
    sys.stdin.readline()
"""


def test_a_step_is_done_once_for_each_value(tmp_path: Path) -> None:
    """What is done is known in the next run; a changed input has it done again."""
    done: list[str] = []
    for value in ("a", "a", "b"):
        Steps(tmp_path / "steps.json").run("packages", value, "packages", lambda value=value: done.append(value))
    assert done == ["a", "b"]


def test_an_interrupted_step_is_done_again_and_those_before_it_are_not(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a download must leave nothing that looks complete."""
    steps = Steps(tmp_path / "steps.json")
    steps.run("environment", 1, "environment", lambda: None)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        steps.run("packages", 1, "packages", interrupted)
    again = Steps(tmp_path / "steps.json")
    assert (again.value_of("environment"), again.value_of("packages")) == (1, None)


def test_a_damaged_record_has_everything_done_again(tmp_path: Path) -> None:
    """A full disk may leave half a file."""
    (tmp_path / "steps.json").write_text('{"packages": ')
    assert Steps(tmp_path / "steps.json").value_of("packages") is None


def test_a_fingerprint_knows_contents_and_not_times(tmp_path: Path) -> None:
    """A fresh checkout of the same files needs no new packages."""
    file = tmp_path / "pyproject.toml"
    file.write_text("one")
    before = fingerprint("auto", files=[file])
    file.touch()
    assert fingerprint("auto", files=[file]) == before
    file.write_text("two")
    assert fingerprint("auto", files=[file]) != before


def test_two_set_ups_of_a_checkout_wait_for_one_another_even_if_one_is_killed(tmp_path: Path) -> None:
    """Two terminals, or an editor and a terminal, may start it at the same time."""

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDS_THE_LOCK, str(tmp_path)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True)

    with start() as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "inside\n"
        with start() as second:
            assert second.stdout is not None
            assert "waiting" in second.stdout.readline()
            first.kill()
            assert second.stdout.readline() == "inside\n"
            second.kill()
