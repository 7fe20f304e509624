"""What the input items of the Responses API become."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from edge_http.openai.responses.input_items import conversation
from kvloom.errors import KvloomError
from kvloom.text.chat_message import ChatMessage, ToolCall

USER = {"role": "user", "content": "Weather?"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "Snow."}


def messages(*items: dict[str, Any], instructions: str | None = None) -> list[ChatMessage]:
    return conversation([msgspec.Raw(msgspec.json.encode(item)) for item in items], instructions)


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def thought(text: str, name: str = "content") -> dict[str, Any]:
    part = {"type": "reasoning_text" if name == "content" else "summary_text", "text": text}
    return {"type": "reasoning", "id": "rs_1", "summary": [], name: [part]}


def test_a_string_is_a_users_message() -> None:
    """The shortest input."""
    assert conversation("hi", None) == [ChatMessage("user", "hi")]


def test_roles_and_parts() -> None:
    """Developers are the system to templates; the parts of a message are one text."""
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages(
        {"type": "message", "role": "developer", "content": "d"}, {"role": "user", "content": parts}, said("c")
    ) == [ChatMessage("system", "d"), ChatMessage("user", "ab"), ChatMessage("assistant", "c")]


def test_a_turn_of_the_assistant_is_one_message() -> None:
    """Templates show reasoning, text and calls of one turn together; calls keep their ids for their results."""
    assert messages(USER, thought("Hm."), said("Let me look."), CALL, CALL | {"call_id": "c2"}, OUTPUT) == [
        ChatMessage("user", "Weather?"),
        ChatMessage(
            "assistant",
            "Let me look.",
            tool_calls=(ToolCall("c1", "f", "{}"), ToolCall("c2", "f", "{}")),
            reasoning="Hm.",
        ),
        ChatMessage("tool", "Snow.", tool_call_id="c1", name="f"),
    ]


def test_order_within_a_turn_is_kept() -> None:
    """What comes after text or calls, and cannot stand before them, begins another message."""
    assert messages(said("a"), thought("r", "summary"), CALL, said("b")) == [
        ChatMessage("assistant", "a"),
        ChatMessage("assistant", "", tool_calls=(ToolCall("c1", "f", "{}"),), reasoning="r"),
        ChatMessage("assistant", "b"),
    ]


def test_reasoning_at_the_end_is_kept() -> None:
    """An answer that was cut off while the model thought is part of the history."""
    assert messages(USER, thought("Hm.")) == [
        ChatMessage("user", "Weather?"),
        ChatMessage("assistant", "", reasoning="Hm."),
    ]


def test_an_output_may_have_parts() -> None:
    """Results of tools are texts or lists of them."""
    output = OUTPUT | {"output": [{"type": "input_text", "text": "Sn"}, {"type": "input_text", "text": "ow."}]}
    assert messages(CALL, output)[-1].content == "Snow."


def test_a_refusal_is_what_the_assistant_said() -> None:
    """Clients send back refusals of other models."""
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert messages(refused) == [ChatMessage("assistant", "No.")]


def test_instructions_and_leading_developer_messages_are_one_system_message() -> None:
    """Most templates know a single system message, at the beginning."""
    developer = {"role": "developer", "content": "d"}
    assert messages(developer, USER, developer, instructions="i") == [
        ChatMessage("system", "i\n\nd"),
        ChatMessage("user", "Weather?"),
        ChatMessage("system", "d"),
    ]
    assert conversation("hi", "i") == [ChatMessage("system", "i"), ChatMessage("user", "hi")]


@pytest.mark.parametrize(
    ("items", "field"),
    [
        ([{"type": "message", "role": "user"}], "input[0].content"),
        ([USER, {"type": "function_call", "call_id": "c", "name": "f"}], "input[1].arguments"),
        ([CALL | {"call_id": ""}], "input[0].call_id"),
        ([CALL | {"arguments": "[]"}], "input[0].arguments"),
        ([CALL | {"namespace": "n"}], "input[0].namespace"),
        ([CALL, OUTPUT | {"call_id": "c9"}], "input[1].call_id"),
        ([CALL, OUTPUT | {"output": [{"type": "input_image", "image_url": "x"}]}], "input[1].output[0].type"),
        ([USER | {"content": [{"type": "input_text", "text": "a", "file_id": "f"}]}], "input[0].content[0].file_id"),
        ([USER | {"surprise": 1}], "input[0].surprise"),
        ([{"type": "compaction", "encrypted_content": "x"}], "input[0].type"),
        ([thought("x") | {"content": "text"}], "input[0].content"),
    ],
)
def test_errors_name_the_field(items: list[dict[str, Any]], field: str) -> None:
    """A client has to find the item that is wrong."""
    with pytest.raises(KvloomError) as caught:
        messages(*items)
    assert caught.value.field == field
