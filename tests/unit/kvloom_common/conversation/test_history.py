"""What an earlier message holds is never a reason to refuse a request."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.conversation.earlier import asked_message
from kvloom.text.chat_message import ChatMessage, ToolCall
from kvloom_common.conversation.history import MAX_COMPLETED_CHARS, KnownCalls, call_arguments, checked_messages

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("given_text", "kept"),
    [
        ("", "{}"),
        (" \n", "{}"),
        ("null", "{}"),
        ('{"city": "Rome"}', '{"city": "Rome"}'),
        ('{"city": "Ro', '{"city": "Ro"}'),
        ('{"city": "Ro\\', '{"city": "Ro"}'),
        ('{"city": "\\u00', '{"city": ""}'),
        ('{"a": [1, {"b": tru', '{"a": [1, {}]}'),
        ('{"a": 1, "b', '{"a": 1}'),
        ('{"a": 1, "b":', '{"a": 1}'),
        ("{", "{}"),
        ('["Beijing"]', '{"arguments": ["Beijing"]}'),
        ('"Beijing"', '{"arguments": "Beijing"}'),
        ("city=Rome", '{"arguments": "city=Rome"}'),
        ('{"a": 1}}', '{"arguments": "{\\"a\\": 1}}"}'),
        ('{"a": "\\ud83d\\ude42 \\ud83d"}', '{"a": "🙂 \ufffd"}'),
    ],
)
def test_arguments_are_an_object(given_text: str, kept: str) -> None:
    """Models are cut off and get calls wrong; their clients send that back for as long as the conversation lasts."""
    assert call_arguments(given_text) == kept


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"a":' * 65 + "1" + "}" * 65, '{"a": [' + "1," * 99]
)
def test_no_arguments_are_too_deep_or_too_long(text: str) -> None:
    """Templates get an object of bounded depth."""
    assert isinstance(json.loads(call_arguments(text)), dict)


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=4), st.data())
def test_arguments_that_were_cut_off_anywhere(whole: dict[str, object], data: st.DataObject) -> None:
    """What the model wrote before it was cut off is kept, and its members have the names that it gave them."""
    text = json.dumps(whole, ensure_ascii=data.draw(st.booleans()))
    kept = json.loads(call_arguments(text[: data.draw(st.integers(0, len(text)))]))
    assert list(kept) == list(whole)[: len(kept)]
    json.dumps(kept, ensure_ascii=False).encode()  # it has no half of a pair of surrogates
    assert json.loads(call_arguments(text)) == whole


@given(st.text())
def test_any_text_of_arguments(text: str) -> None:
    """There is none that fails."""
    json.dumps(json.loads(call_arguments(text)), ensure_ascii=False).encode()


def test_no_more_is_completed_than_a_request_may_cost() -> None:
    """Completing walks through the text in Python, which holds up all other requests."""
    calls = KnownCalls()
    cut_off = '{"path": "' + "x" * (MAX_COMPLETED_CHARS // 2)
    kept = [json.loads(calls.add("a", "f", cut_off).arguments) for _ in range(3)]
    assert [list(each) for each in kept] == [["path"], ["arguments"], ["arguments"]]
    assert calls.add("a", "f", '{"b": 1}').arguments == '{"b": 1}'


def test_results_find_their_calls() -> None:
    """By the id; without one in order; and those whose call is gone are kept."""
    calls = KnownCalls()
    assert calls.add("a", "f", "{}") == ToolCall("a", "f", "{}")
    unnamed = calls.add(None, None, '{"x": 1')
    assert (unnamed.name, unnamed.arguments) == ("unknown", '{"x": 1}')
    assert calls.result("a", None, "1") == ChatMessage("tool", "1", tool_call_id="a", name="f")
    assert calls.result(None, None, "2") == ChatMessage("tool", "2", tool_call_id=unnamed.id, name="unknown")
    assert calls.result("gone", "g", "3") == ChatMessage("tool", "3", tool_call_id="gone", name="g")


def test_messages_of_grpc_and_of_the_sdk() -> None:
    """They have the same rules: what does not go with a role is left out."""
    assert checked_messages(
        [
            ChatMessage("user", "hi", reasoning="hm", tool_calls=[ToolCall("a", "f", "")]),
            ChatMessage("assistant", "", [ToolCall("", "f", '{"a')]),
            ChatMessage("tool", "x"),
        ]
    ) == [
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "", [ToolCall("call_0", "f", "{}")]),
        ChatMessage("tool", "x", tool_call_id="call_0", name="f"),
    ]


@pytest.mark.parametrize(
    ("roles", "asked"),
    [
        (["user"], 0),
        (["user", "assistant", "user"], 2),
        (["user", "user", "system"], 1),
        (["user", "assistant"], None),
        (["user", "assistant", "tool"], None),
        (["user", "assistant", "tool", "user"], None),  # the image that the tool has read
        (["system"], None),
        ([], None),
    ],
)
def test_which_message_asks(roles: list[str], asked: int | None) -> None:
    """All others are history."""
    assert asked_message(roles) == asked
