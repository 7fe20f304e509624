"""Log lines: what they look like, and when they leave."""

from __future__ import annotations

import asyncio
import io
import json

from kvloom.process.log_lines import FLUSH_SECONDS, LineWriter, render_console, render_json


async def test_lines_of_a_moment_leave_together() -> None:
    """One system call however many requests end, and none much later."""
    file = io.StringIO()
    writer = LineWriter(file)
    writer.info("a")
    writer.info("b")
    assert file.getvalue() == ""
    async with asyncio.timeout(5):
        while not file.getvalue():  # noqa: ASYNC110  (a file tells nobody)
            await asyncio.sleep(FLUSH_SECONDS / 4)
    assert file.getvalue() == "a\nb\n"


async def test_a_warning_leaves_at_once_and_in_order() -> None:
    """A process that dies of what it warned of has said so."""
    file = io.StringIO()
    writer = LineWriter(file)
    writer.info("a")
    writer.warning("b")
    assert file.getvalue() == "a\nb\n"


def test_without_a_loop_nothing_waits() -> None:
    """Start and end of a process, and threads."""
    file = io.StringIO()
    LineWriter(file).info("a")
    assert file.getvalue() == "a\n"


def test_the_console_shows_keys_and_stack_traces() -> None:
    """Values that would be taken for something else are quoted."""
    event = {"event": "it broke", "level": "error", "timestamp": "T", "b": 1, "a": "x y", "exception": "Traceback"}
    line = render_console(None, "error", event)
    assert line.startswith("T [error    ] it broke ")
    assert line.endswith(" a='x y' b=1\nTraceback")


def test_json_takes_any_value() -> None:
    """A log call never fails for what it was given."""
    line = render_json(None, "info", {"event": "e", "value": ValueError("x"), "pair": (1, None)})
    assert json.loads(line) == {"event": "e", "value": "ValueError('x')", "pair": [1, None]}
