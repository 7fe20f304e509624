"""The tool calls of a conversation are checked, and normalised for templates."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.parsers.history import HistoryError, normalise_history


def call(call_id: str = "c1", name: str = "get_weather", arguments: Any = '{"city": "Paris"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def answer(call_id: Any = "c1", content: str = "rain") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


USER = {"role": "user", "content": "Weather?"}


def test_arguments_become_objects_and_answers_get_names() -> None:
    """Templates iterate over arguments, and several need the function's name beside its answer."""
    messages = [USER, assistant(call(), call("c2", "get_time", "")), answer("c2"), answer("c1"), USER]
    found = normalise_history(messages)
    assert [each["function"]["arguments"] for each in found[1]["tool_calls"]] == [{"city": "Paris"}, {}]
    assert [message.get("name") for message in found] == [None, None, "get_time", "get_weather", None]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'


def test_ids_may_be_used_again_in_a_later_turn() -> None:
    """Some servers number the calls of each answer from 0."""
    normalise_history([USER, assistant(call()), answer(), assistant(call()), answer()])


def test_other_messages_stay_as_they_are() -> None:
    """Whatever a template knows must reach it."""
    messages = [USER, {"role": "assistant", "content": "Hi", "reasoning_content": "x", "tool_calls": None}]
    assert normalise_history(messages) == messages
    assert normalise_history([USER, assistant(call(arguments={"a": 1})), answer()])[1]["tool_calls"][0]["function"] == {
        "name": "get_weather",
        "arguments": {"a": 1},
    }


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([answer()], "messages[0].tool_call_id"),
        ([assistant(call()), answer("c9")], "messages[1].tool_call_id"),
        ([assistant(call()), answer(None)], "messages[1].tool_call_id"),
        ([assistant(call()), answer(), answer()], "messages[2].tool_call_id"),
        ([assistant(call()), USER], "messages[1]"),
        ([USER, assistant(call())], "messages"),
        ([assistant()], "messages[0].tool_calls"),
        ([assistant("x")], "messages[0].tool_calls[0]"),
        ([assistant(call(""))], "messages[0].tool_calls[0].id"),
        ([assistant(call(), call())], "messages[0].tool_calls[1].id"),
        ([assistant({**call(), "type": "custom"})], "messages[0].tool_calls[0].type"),
        ([assistant({"id": "a", "type": "function"})], "messages[0].tool_calls[0].function"),
        ([assistant(call(name=""))], "messages[0].tool_calls[0].function.name"),
        ([assistant(call(arguments="[1]"))], "messages[0].tool_calls[0].function.arguments"),
        ([assistant(call(arguments="{"))], "messages[0].tool_calls[0].function.arguments"),
        ([assistant(call(arguments="[" * 100_000))], "messages[0].tool_calls[0].function.arguments"),
        ([assistant(call(arguments=5))], "messages[0].tool_calls[0].function.arguments"),
        ([{**USER, "tool_calls": [call()]}], "messages[0].tool_calls"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_its_field(messages: list[dict[str, Any]], field: str) -> None:
    """A client must see which message to repair."""
    with pytest.raises(HistoryError) as caught:
        normalise_history(messages)
    assert caught.value.field == field
    assert str(caught.value).endswith(".")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["", "c1", "function", "{}", "tool", "assistant"]),
    lambda values: (
        st.lists(values, max_size=2)
        | st.dictionaries(st.sampled_from(["id", "type", "function", "name", "arguments", "tool_calls"]), values)
    ),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["tool", "assistant", "user"])},
    optional={"tool_calls": ANYTHING, "tool_call_id": ANYTHING, "content": ANYTHING},
)


@given(st.lists(MESSAGE, max_size=3))
def test_no_history_raises_anything_else(messages: list[dict[str, Any]]) -> None:
    """Clients send anything: it is a refusal, never a server's error."""
    with contextlib.suppress(HistoryError):
        normalise_history(messages)
