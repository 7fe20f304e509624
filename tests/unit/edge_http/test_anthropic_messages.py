"""Anthropic's content blocks as messages of a conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_http.anthropic.messages import chat_messages, check_continued, is_continued
from edge_http.anthropic.requests import PromptBody, decode_count_tokens
from kvloom.errors import KvloomError
from kvloom.text.chat_message import ChatMessage, ToolCall


def body(messages: list[dict[str, Any]], **fields: Any) -> PromptBody:
    return decode_count_tokens(json.dumps({"model": "m", "messages": messages, **fields}).encode(), 100)


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def use(call_id: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": given}


def test_blocks_and_turns_are_joined_by_a_blank_line() -> None:
    """Consecutive messages of one role are one turn, which templates with strict turns demand; no word runs into the
    next."""
    converted = chat_messages(
        body(
            [
                {"role": "user", "content": "a"},
                {"role": "user", "content": [text("b"), text(""), text("c")]},
                {"role": "assistant", "content": [text("d")]},
                {"role": "assistant", "content": "e"},
                {"role": "user", "content": "f"},
            ],
            system=[text("s"), text("t")],
        )
    )
    assert converted == [
        ChatMessage("system", "s\n\nt"),
        ChatMessage("user", "a\n\nb\n\nc"),
        ChatMessage("assistant", "d\n\ne"),
        ChatMessage("user", "f"),
    ]


def test_calls_and_results() -> None:
    """Results stand before the text that follows them, in messages of their own, with the names of their tools."""
    converted = chat_messages(
        body(
            [
                {"role": "user", "content": "go"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "redacted_thinking", "data": "d"},
                        text("calling"),
                        use("1", a=[1, "é"]),
                        use("2"),
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "2", "content": "no", "is_error": True},
                        {"type": "tool_result", "tool_use_id": "1", "content": [text("x"), text("y")]},
                        {"type": "tool_result", "tool_use_id": "1"},
                        text("and?"),
                    ],
                },
            ]
        )
    )
    [_, assistant, *rest] = converted
    assert (assistant.content, assistant.reasoning) == ("calling", "hm")
    assert [(call.id, call.name, json.loads(call.arguments)) for call in assistant.tool_calls] == [
        ("1", "f", {"a": [1, "é"]}),
        ("2", "f", {}),
    ]
    assert isinstance(assistant.tool_calls[0], ToolCall)
    assert rest == [
        ChatMessage("tool", "Error: no", tool_call_id="2", name="f"),
        ChatMessage("tool", "x\n\ny", tool_call_id="1", name="f"),
        ChatMessage("tool", "", tool_call_id="1", name="f"),
        ChatMessage("user", "and?"),
    ]


def test_a_system_message_in_the_middle() -> None:
    """Clients of today may send instructions between the turns."""
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
    assert [message.role for message in chat_messages(body(messages))] == ["user", "system", "user"]


@pytest.mark.parametrize(
    "kind",
    ["image", "document", "search_result", "server_tool_use", "web_search_tool_result", "mcp_tool_use", "compaction"],
)
def test_blocks_that_kvloom_does_not_understand(kind: str) -> None:
    """They are refused by their type, whatever else they have, and never left out."""
    with pytest.raises(KvloomError, match=kind) as caught:
        chat_messages(body([{"role": "user", "content": [text("x"), {"type": kind, "more": {"a": 1}}]}]))
    assert caught.value.field == "messages[0].content[1].type"


@pytest.mark.parametrize(
    ("content", "is_good"),
    [
        ("Sure:", True),
        ([text("a"), text("b")], True),
        ("Sure: ", False),
        ("", False),
        ([use("1")], False),
        ([{"type": "thinking", "thinking": "hm", "signature": ""}, text("x")], False),
    ],
)
def test_what_an_answer_may_begin_with(content: Any, is_good: bool) -> None:
    """Only text can be continued, and models continue text that ends with whitespace badly."""
    given = body([{"role": "user", "content": "a"}, {"role": "assistant", "content": content}])
    assert is_continued(given)
    converted = chat_messages(given)
    if is_good:
        check_continued(converted)
    else:
        with pytest.raises(KvloomError, match="last message"):
            check_continued(converted)


def test_unknown_fields_are_named() -> None:
    """Also in the middle of a block."""
    with pytest.raises(KvloomError) as caught:
        body([{"role": "user", "content": [{"type": "text", "text": "x", "bold": True}]}])
    assert caught.value.field == "messages[0].content[0].bold"
