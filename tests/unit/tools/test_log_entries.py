"""The logs of several processes are merged by time, and nothing of them is lost."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tools.supervisor.logs.entries import (
    EntryParser,
    LiveMerge,
    LogEntry,
    RequestFilter,
    entries_of,
    level_filter,
    merged,
)


def stamp(seconds: float) -> str:
    at = datetime.datetime.fromtimestamp(1_700_000_000 + seconds, datetime.UTC)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def console(seconds: float, text: str, level: str = "info") -> str:
    return f"{stamp(seconds)} [{level:<9}] {text}"


def as_json(seconds: float, text: str, **fields: str) -> str:
    return json.dumps({"timestamp": stamp(seconds), "level": "info", "event": text, **fields})


LINES = st.lists(
    st.one_of(
        st.builds(console, st.integers(0, 50), st.just("line")),
        st.builds(as_json, st.integers(0, 50), st.just("line")),
        st.sampled_from(["", "Traceback (most recent call last):", "{not json", '{"timestamp": 5}', "2026 [info] no"]),
    ),
    max_size=12,
)


def lines_of(entries: Sequence[LogEntry], process: str) -> list[str]:
    return [line for entry in entries if entry.process == process for line in entry.lines]


@given(st.lists(LINES, min_size=1, max_size=4))
def test_a_merge_loses_nothing_and_keeps_the_order_of_each_process(logs: list[list[str]]) -> None:
    """Clocks that are set back and lines without a time must not shuffle or drop what a process wrote."""
    entries = list(merged([entries_of(f"p{i}", lines) for i, lines in enumerate(logs)]))
    for i, lines in enumerate(logs):
        assert lines_of(entries, f"p{i}") == lines
    assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)


@given(st.lists(LINES, min_size=1, max_size=4), st.integers(1, 5))
def test_a_live_merge_loses_nothing_and_is_bounded(logs: list[list[str]], max_entries: int) -> None:
    """`--follow` must show every line in its process's order, with bounded memory."""
    merge = LiveMerge(1.0, max_entries)
    shown: list[LogEntry] = []
    for i, lines in enumerate(logs):
        for entry in entries_of(f"p{i}", lines):
            merge.add(entry, float(i))
        shown += merge.take(float(i))
    shown += merge.take(100.0)
    for i, lines in enumerate(logs):
        assert lines_of(shown, f"p{i}") == lines


def test_a_live_merge_waits_for_earlier_lines_of_others() -> None:
    """Processes write a line up to 20 ms late, each at a time of its own."""
    merge = LiveMerge(0.3, 100)
    merge.add(LogEntry("a", 2.0, "info", ("second",)), 10.0)
    assert list(merge.take(10.1)) == []
    merge.add(LogEntry("b", 1.0, "info", ("first",)), 10.1)
    assert [entry.lines[0] for entry in merge.take(10.3)] == ["first", "second"]


def test_a_stack_trace_stays_with_its_line() -> None:
    """A trace that is torn apart by other processes' lines cannot be read."""
    broken = [console(1, "it broke", "error"), "Traceback (most recent call last):", "  File x", "ValueError"]
    entries = list(merged([entries_of("a", broken), entries_of("b", [console(0, "before"), console(2, "after")])]))
    assert [(entry.process, len(entry.lines)) for entry in entries] == [("b", 1), ("a", 4), ("b", 1)]
    parser = EntryParser("a")
    assert [parser.feed(line) for line in broken] == [None] * 4
    last = parser.flush()
    assert last is not None
    assert last.level == "error"


def test_a_request_is_found_by_both_of_its_ids() -> None:
    """Lines with only the fabric's id are found by the caller's id, in both formats; lines of others are not."""
    lines = [
        console(1, "sequence_ended    request_id=chatcmpl-1.0 num_output_tokens=3"),
        console(2, "http_request_ended client_request_id=mine request_id=chatcmpl-1 path='/a b'"),
        as_json(3, "request_ended", request_id="chatcmpl-1", client_request_id="mine"),
        console(4, "http_request_ended client_request_id=other request_id=chatcmpl-12"),
        console(5, "requests_moved    num_requests=1"),
    ]
    entries = list(entries_of("p", lines))
    for wanted in ("mine", "chatcmpl-1"):
        selected = RequestFilter(wanted)
        for entry in entries:
            selected.learn(entry)
        assert [selected.matches(entry) for entry in entries] == [True, True, True, False, False], wanted


def test_levels_are_a_minimum() -> None:
    """Someone who looks for warnings wants errors too."""
    accepts = level_filter("warning")
    assert [accepts(LogEntry("p", 0, level, ("",))) for level in ("info", "warning", "error")] == [False, True, True]
