"""The format of log lines, and the time at which they are written."""

from __future__ import annotations

import io
import json
from typing import Any

from kvloom_common.process.log_lines import LineWriter, render_console, render_json, stamp
from tests.waiting import eventually


def writer_to(file: io.StringIO) -> LineWriter:
    """Shows of each event its message alone."""
    return LineWriter(file, lambda event: str(event["event"]), "router")


def event(message: str, **fields: Any) -> dict[str, Any]:
    return {"event": message, "timestamp": 0, **fields}


async def test_lines_of_a_moment_leave_together() -> None:
    """There is one system call for any number of requests that end, and no line is written much later."""
    file = io.StringIO()
    writer = writer_to(file)
    writer.info(event("a"))
    writer.info(event("b"))
    assert file.getvalue() == ""
    assert await eventually(file.getvalue, "the lines") == "a\nb\n"


async def test_a_warning_leaves_at_once_and_in_order() -> None:
    """A warning is written before the process dies of its cause."""
    file = io.StringIO()
    writer = writer_to(file)
    writer.info(event("a"))
    writer.warning(event("b"))
    assert file.getvalue() == "a\nb\n"


def test_without_a_loop_nothing_waits() -> None:
    """This covers the start and the end of a process, and threads."""
    file = io.StringIO()
    writer_to(file).info(event("a"))
    assert file.getvalue() == "a\n"


def test_the_console_shows_keys_and_stack_traces() -> None:
    """Values that could be misread are quoted."""
    broken = {"event": "it broke", "level": "error", "timestamp": "T", "b": 1, "a": "x y", "exception": "Traceback"}
    line = render_console(broken)
    assert line.startswith("T [error    ] it broke ")
    assert line.endswith(" a='x y' b=1\nTraceback")


def test_json_takes_any_value() -> None:
    """A log call never fails because of its arguments."""
    line = render_json({"event": "e", "value": ValueError("x"), "pair": (1, None)})
    assert json.loads(line) == {"event": "e", "value": "ValueError('x')", "pair": [1, None]}


def test_a_line_has_the_level_the_process_and_the_time() -> None:
    """The time is that of the event, however much later the line is written, and has all its microseconds."""
    file = io.StringIO()
    (late,), _ = stamp(None, "info", {"event": "e"})
    late["timestamp"] = 1_700_000_000_000_001_999
    (later,), _ = stamp(None, "warning", {"event": "f"})
    later["timestamp"] = 1_700_000_000_999_999_000
    writer = LineWriter(file, render_json, "shard-0")
    writer.warning(late)
    writer.warning(later)
    first, second = map(json.loads, file.getvalue().splitlines())
    assert first == {
        "event": "e",
        "level": "info",
        "process": "shard-0",
        "timestamp": "2023-11-14T22:13:20.000001Z",
    }
    assert second["timestamp"] == "2023-11-14T22:13:20.999999Z"
