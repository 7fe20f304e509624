"""Anthropic's content blocks as messages of a conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_http.anthropic.messages import chat_messages, is_continued
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


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
NOTE = "[image left out: this model reads text only]"


@pytest.mark.parametrize("kind", ["image", "audio", "document", "container_upload", "thinking", "tool_use", "no_such"])
def test_what_the_new_turn_cannot_ask_for(kind: str) -> None:
    """It is refused by its type, whatever else it has, and never left out."""
    with pytest.raises(KvloomError, match=kind) as caught:
        chat_messages(body([{"role": "user", "content": [text("x"), {"type": kind, "more": {"a": 1}}]}]))
    assert caught.value.field.startswith("messages[0].content[1]")


@pytest.mark.parametrize(
    ("block", "kept"),
    [
        (IMAGE, NOTE),
        ({"type": "document", "source": {"type": "base64", "data": "x"}}, NOTE.replace("image", "document")),
        ({"type": "document", "title": "t", "source": {"type": "text", "data": "x"}}, "t\n\nx"),
        ({"type": "search_result", "title": "t", "source": "s", "content": [text("x")]}, "t\n\ns\n\nx"),
        ({"type": "tool_reference", "tool_name": "f"}, "f"),
        ({"type": "compaction", "content": "before"}, "before"),
        ({"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}}, ""),
        ({"type": "fallback", "from": "a"}, ""),
        ({"type": "no_such_block", "a": 1}, ""),
        ({"type": "no_such_block", "text": "but text"}, "but text"),
        ({"type": "text", "text": 5}, ""),
        ({"type": "text"}, ""),
        (text("x") | {"bold": True, "cache_control": {"type": "ephemeral", "scope": "global"}}, "x"),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_blocks_of_the_history(role: str, block: dict[str, Any], kept: str) -> None:
    """They are kept, mapped to text, or left out: a refusal would repeat at every later turn."""
    converted = chat_messages(
        body(
            [
                {"role": "user", "content": "a"},
                {"role": role, "content": [text("b"), block]},
                {"role": "user", "content": "c"},
            ]
        )
    )
    content = "\n\n".join(["b", kept] if kept else ["b"])
    if role == "user":
        assert converted == [ChatMessage("user", f"a\n\n{content}\n\nc")]
    else:
        assert converted[1] == ChatMessage(role, content)


def test_media_among_the_results_of_tools() -> None:
    """An agent has read them; the user did not ask for them, so the model learns that it cannot see them."""
    result = {"type": "tool_result", "tool_use_id": "1", "content": [IMAGE, {"type": "no_such_block"}, text("x")]}
    document = {"type": "document", "source": {"type": "base64", "data": "x"}}
    content = [result, document, {"type": "no_such_block"}]
    converted = chat_messages(
        body([{"role": "assistant", "content": [use("1")]}, {"role": "user", "content": content}])
    )
    assert converted[1:] == [
        ChatMessage("tool", f"{NOTE}\n\nx", tool_call_id="1", name="f"),
        ChatMessage("user", NOTE.replace("image", "document")),
    ]


def test_calls_that_another_server_answered() -> None:
    """They are calls with results, in their order."""
    searched = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"title": "t", "url": "u"}]}
    blocks = [text("Let me look."), searched, found, text("It is t.")]
    converted = chat_messages(body([{"role": "assistant", "content": blocks}, {"role": "user", "content": "ok"}]))
    assert converted == [
        ChatMessage("assistant", "Let me look.", (ToolCall("s1", "web_search", '{"query": "q"}'),)),
        ChatMessage("tool", '[{"title": "t", "url": "u"}]', tool_call_id="s1", name="web_search"),
        ChatMessage("assistant", "It is t."),
        ChatMessage("user", "ok"),
    ]


@pytest.mark.parametrize(
    ("content", "continued"),
    [
        ("Sure:", "Sure:"),
        ([text("a"), text("b")], "a\n\nb"),
        ("Sure: ", "Sure:"),
        ([{"type": "thinking", "thinking": "hm", "signature": ""}, text("x")], "x"),
        ("", None),
        ([], None),
        ([text(" ")], None),
        ([text("x"), use("1")], None),
        ([{"type": "thinking", "thinking": "hm", "signature": ""}], None),
    ],
)
def test_what_an_answer_may_begin_with(content: Any, continued: str | None) -> None:
    """Text can be continued, and models continue text that ends with white space badly. All else is followed by a new
    answer, and nothing by nothing."""
    given = body([{"role": "user", "content": "a"}, {"role": "assistant", "content": content}])
    assert is_continued(given) == (continued is not None)
    converted = chat_messages(given)
    if continued is not None:
        assert converted[-1].content == continued
    elif not content or content == [text(" ")]:
        assert [message.role for message in converted] == ["user"]
