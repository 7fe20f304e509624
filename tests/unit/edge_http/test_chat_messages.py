"""The messages of chat completions as those of a conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_http.openai.messages import chat_messages
from edge_http.openai.requests import decode_chat
from kvloom.errors import KvloomError
from kvloom.text.chat_message import ChatMessage, ToolCall

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
NOTE = "[image left out: this model reads text only]"


def converted(*messages: dict[str, Any]) -> list[ChatMessage]:
    return chat_messages(decode_chat(json.dumps({"model": "m", "messages": messages}).encode(), 100).messages)


def function(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": fields}]}


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        (
            {"content": "x", "reasoning": "hm", "finish_reason": "stop", "id": "m"},
            ChatMessage("assistant", "x", reasoning="hm"),
        ),
        ({"content": "x", "reasoning_details": [{}], "provider": 1}, ChatMessage("assistant", "x")),
        ({"content": None}, ChatMessage("assistant", "")),
        ({"content": [], "audio": {"id": "a"}, "annotations": [{}]}, ChatMessage("assistant", "")),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, ChatMessage("assistant", "No.")),
        (
            {"content": [{"type": "thinking", "thinking": []}, {"type": "text", "text": "x"}]},
            ChatMessage("assistant", "x"),
        ),
        ({"content": [IMAGE, {"type": "text", "text": "x"}]}, ChatMessage("assistant", f"{NOTE}x")),
        (function(name="f", arguments='{"a": "b'), ChatMessage("assistant", "", (ToolCall("a", "f", '{"a": "b"}'),))),
        (function(name="f", arguments={"a": 1}), ChatMessage("assistant", "", (ToolCall("a", "f", '{"a": 1}'),))),
        (function(name="f"), ChatMessage("assistant", "", (ToolCall("a", "f", "{}"),))),
        ({"tool_calls": [{"extra_content": {}}]}, ChatMessage("assistant", "", (ToolCall("call_0", "unknown", "{}"),))),
        (
            {"tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
            ChatMessage("assistant", "", (ToolCall("a", "f", '{"input": "x"}'),)),
        ),
        (
            {"function_call": {"name": "f", "arguments": "["}},
            ChatMessage("assistant", "", (ToolCall("f", "f", '{"arguments": "["}'),)),
        ),
        ({"role": "tool", "content": "x"}, ChatMessage("tool", "x", tool_call_id="call_0", name="unknown")),
        (
            {"role": "tool", "tool_call_id": "c", "name": "f", "content": [IMAGE]},
            ChatMessage("tool", NOTE, tool_call_id="c", name="f"),
        ),
        ({"role": "function", "name": "f", "content": "x"}, ChatMessage("tool", "x", tool_call_id="f", name="f")),
        ({"role": "user", "content": [IMAGE], "tool_call_id": "c", "tool_calls": [{}]}, ChatMessage("user", NOTE)),
        ({"role": "system", "content": "x", "cache_control": {}}, ChatMessage("system", "x")),
    ],
)
def test_messages_of_the_history(message: dict[str, Any], kept: ChatMessage) -> None:
    """They are kept, mapped to text, or left out: a refusal would repeat at every later turn."""
    assert converted(USER, {"role": "assistant"} | message, USER)[1] == kept


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (USER | {"role": "wizard"}, "messages[0].role"),
        (USER | {"content": None}, "messages[0].content"),
        (USER | {"content": [IMAGE]}, "messages[0].content[0].type"),
        (USER | {"content": [{"type": "text"}]}, "messages[0].content[0].text"),
        (USER | {"content": 5}, "messages[0].content"),
    ],
)
def test_what_the_new_turn_cannot_ask_for(message: dict[str, Any], field: str) -> None:
    """It is refused by name, and never left out."""
    with pytest.raises(KvloomError) as caught:
        converted(message)
    assert caught.value.field == field
