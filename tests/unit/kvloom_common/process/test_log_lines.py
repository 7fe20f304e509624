"""The format of log lines, and the time at which they are written."""

from __future__ import annotations

import io
import json

from kvloom_common.process.log_lines import LineWriter, render_console, render_json
from tests.waiting import eventually


async def test_lines_of_a_moment_leave_together() -> None:
    """There is one system call for any number of requests that end, and no line is written much later."""
    file = io.StringIO()
    writer = LineWriter(file)
    writer.info("a")
    writer.info("b")
    assert file.getvalue() == ""
    assert await eventually(file.getvalue, "the lines") == "a\nb\n"


async def test_a_warning_leaves_at_once_and_in_order() -> None:
    """A warning is written before the process dies of its cause."""
    file = io.StringIO()
    writer = LineWriter(file)
    writer.info("a")
    writer.warning("b")
    assert file.getvalue() == "a\nb\n"


def test_without_a_loop_nothing_waits() -> None:
    """This covers the start and the end of a process, and threads."""
    file = io.StringIO()
    LineWriter(file).info("a")
    assert file.getvalue() == "a\n"


def test_the_console_shows_keys_and_stack_traces() -> None:
    """Values that could be misread are quoted."""
    event = {"event": "it broke", "level": "error", "timestamp": "T", "b": 1, "a": "x y", "exception": "Traceback"}
    line = render_console(None, "error", event)
    assert line.startswith("T [error    ] it broke ")
    assert line.endswith(" a='x y' b=1\nTraceback")


def test_json_takes_any_value() -> None:
    """A log call never fails because of its arguments."""
    line = render_json(None, "info", {"event": "e", "value": ValueError("x"), "pair": (1, None)})
    assert json.loads(line) == {"event": "e", "value": "ValueError('x')", "pair": [1, None]}
