"""The order in which the lines of a batch are answered."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.batches.lines import LineReader, in_turn

LONG = "the quick brown fox " * 300


def turns(*bodies: dict[str, Any]) -> list[int]:
    """The numbers of the lines, in the order in which they are answered."""
    reader = LineReader("/v1/chat/completions")
    for number, body in enumerate(bodies):
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        reader.feed(json.dumps(line).encode() + b"\n")
    reader.finish()
    assert not reader.errors
    return [line.number for line in in_turn(reader.lines)]


def chat(system: str, question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {**more, "model": "tiny", "messages": messages}


def test_lines_that_begin_alike_come_one_after_the_other() -> None:
    """Whatever stands between them in the file, and whatever differs besides their prompts."""
    first, second, third = (f"{name} {LONG}" for name in ("one", "two", "three"))
    found = turns(
        chat(first, "a"),
        chat(second, "b"),
        chat(first, "c", temperature=0.5, max_tokens=3),
        chat(third, "d"),
        chat(second, "e", user="somebody"),
        chat(first, "f"),
    )
    assert found == [1, 3, 6, 2, 5, 4]


def test_those_that_share_more_are_closer() -> None:
    """A long document is shared by the questions about it, and a system message by all."""
    one, two = (f"{LONG} {name} {3 * LONG}" for name in ("one", "two"))
    assert turns(chat(one, "a"), chat(two, "b"), chat("other", "c"), chat(one, "d")) == [1, 4, 2, 3]


def test_other_bodies_keep_their_order() -> None:
    """Bodies without prompts, or with any JSON in them, are refused later, by the edge."""
    assert turns({}, {"messages": 5}, {"messages": None}) == [1, 3, 2]


@given(st.lists(st.sampled_from("abcd"), max_size=30))
def test_each_line_has_one_turn(systems: list[str]) -> None:
    found = turns(*(chat(name * 2000, str(number)) for number, name in enumerate([*systems, "e"])))
    assert sorted(found) == list(range(1, len(systems) + 2))
    groups = [[*systems, "e"][number - 1] for number in found]
    assert groups == sorted(groups, key=[*systems, "e"].index)
