"""Tests wait for what happens, not for time to pass: a sleep is too short on a busy machine, and too long on others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import eventually

TESTS = Path(__file__).resolve().parents[1]
REASON = "# sleep: "
"""Begins the comment of a sleep that is the behaviour itself, as a slow peer's."""
VIRTUAL_CLOCK = "VirtualLoop"
"""Under it a sleep takes no time."""


def unexplained_sleeps(source: str) -> Iterator[int]:
    """The lines of calls of any `sleep`, except for `sleep(0)`, which yields to other tasks."""
    if "sleep" not in source:
        return  # parsing takes milliseconds
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or _name_of(node.func) != "sleep":
            continue
        is_yield = len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
        assert node.end_lineno is not None
        if not is_yield and not any(REASON in line for line in lines[node.lineno - 1 : node.end_lineno]):
            yield node.lineno


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_a_sleep_says_why_it_is_one() -> None:
    """Sixty sleeps made tests slow here and flaky elsewhere: `tests.waiting.eventually` asks until it is so."""
    found = {
        f"{path.relative_to(TESTS.parent)}:{line}"
        for path in TESTS.rglob("*.py")
        if VIRTUAL_CLOCK not in (source := path.read_text())
        for line in unexplained_sleeps(source)
    }
    assert not found, f'wait for an event, or by tests.waiting.eventually, or say "{REASON}why" beside it'


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("time.sleep(1)", [1]),
        ("await asyncio.sleep(0.1 * n)", [1]),
        ("from time import sleep\nsleep(delay)", [2]),
        ("await asyncio.sleep(0)", []),
        ("time.sleep(0.1)  # sleep: a slow peer", []),
        ("time.sleep(0.1)  # until it is there", [1]),
        ("time.sleep(\n    0.1\n)  # sleep: a slow peer", []),
    ],
)
def test_every_kind_of_sleep_is_found(source: str, lines: list[int]) -> None:
    """A check that finds nothing would pass for ever."""
    assert list(unexplained_sleeps(source)) == lines


async def test_waiting_returns_what_was_found_and_ends_at_its_bound() -> None:
    """A test that waits for what never comes must say what it was."""
    answers = iter([0, "", "found"])

    async def asked() -> object:
        return next(answers)

    assert await eventually(asked) == "found"
    with pytest.raises(AssertionError, match=r"the moon did not come true within 0\.01 s"):
        await eventually(lambda: False, "the moon", 0.01)
