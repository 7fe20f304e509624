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
        ([USER | {"content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].type"),
        ([USER | {"content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"type": "item_reference", "id": "msg_1"}, USER], "input[0].type"),
        ([{"type": "web_search_call", "id": "ws_1"}], "input"),
    ],
)
def test_errors_name_the_field(items: list[dict[str, Any]], field: str) -> None:
    """A client has to find the item that is wrong."""
    with pytest.raises(KvloomError) as caught:
        messages(*items)
    assert caught.value.field == field


NOTE = "[image left out: this model reads text only]"


@pytest.mark.parametrize(
    ("item", "kept"),
    [
        (CALL | {"arguments": '{"a": "b'}, ToolCall("c1", "f", '{"a": "b"}')),
        (CALL | {"arguments": None, "namespace": "n", "caller": {"type": "program"}}, ToolCall("c1", "n__f", "{}")),
        ({"type": "function_call", "id": "fc_1", "name": "f"}, ToolCall("call_0", "f", "{}")),
        (
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
            ToolCall("c1", "apply_patch", '{"input": "*** Begin"}'),
        ),
        (
            {"type": "local_shell_call", "call_id": "c1", "action": {"command": ["ls"]}, "status": "completed"},
            ToolCall("c1", "local_shell", '{"command": ["ls"]}'),
        ),
        (
            {"type": "apply_patch_call", "call_id": "c1", "operation": {"type": "delete_file", "path": "a"}},
            ToolCall("c1", "apply_patch", '{"type": "delete_file", "path": "a"}'),
        ),
        (
            {"type": "code_interpreter_call", "code": "1", "call_id": "c1"},
            ToolCall("c1", "code_interpreter", '{"code": "1"}'),
        ),
    ],
)
def test_calls_of_any_tool(item: dict[str, Any], kept: ToolCall) -> None:
    """The history of an agent has calls of tools that this server does not have, and calls that were cut off."""
    output = {"type": item["type"] + "_output", "call_id": kept.id, "output": "done"}
    assert messages(USER, item, output, USER)[1:3] == [
        ChatMessage("assistant", "", tool_calls=(kept,)),
        ChatMessage("tool", "done", tool_call_id=kept.id, name=kept.name),
    ]


def test_a_call_with_its_result() -> None:
    """Tools that a server ran have both in one item."""
    item = {"type": "mcp_call", "id": "mcp_1", "name": "f", "arguments": "{}", "output": "x", "server_label": "s"}
    assert messages(USER, item, USER)[1:3] == [
        ChatMessage("assistant", "", tool_calls=(ToolCall("call_0", "f", "{}"),)),
        ChatMessage("tool", "x", tool_call_id="call_0", name="f"),
    ]


@pytest.mark.parametrize(
    ("output", "kept"),
    [
        ([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}], f"a{NOTE}"),
        ([{"type": "tool_reference", "name": "f"}], '{"type": "tool_reference", "name": "f"}'),
        ([{"stdout": "a", "outcome": {"type": "exit"}}], '[{"stdout": "a", "outcome": {"type": "exit"}}]'),
        ({"type": "computer_screenshot", "image_url": "x"}, '{"type": "computer_screenshot", "image_url": "x"}'),
        (None, ""),
    ],
)
def test_results_of_any_shape(output: Any, kept: str) -> None:
    """An image that an agent has read is noted: the user did not ask this model to see it."""
    assert messages(CALL, OUTPUT | {"output": output})[-1].content == kept


@pytest.mark.parametrize(
    ("item", "kept"),
    [
        ({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}, []),
        ({"type": "reasoning", "content": "text"}, [ChatMessage("assistant", "", reasoning="text")]),
        ({"type": "web_search_call", "id": "ws_1", "status": "completed"}, []),
        ({"type": "additional_tools", "tools": [{"type": "custom", "name": "x"}]}, []),
        ({"type": "ghost_snapshot", "ghost_commit": {}}, []),
        ({"type": "configuration_update", "reasoning": {"effort": "low"}}, []),
        ({"type": "message", "role": "user", "content": [], "internal_metadata": {}}, [ChatMessage("user", "")]),
        ({"type": "message", "role": "user", "content": [{"type": "input_image"}]}, [ChatMessage("user", NOTE)]),
        ({"type": "message", "role": "assistant"}, [ChatMessage("assistant", "")]),
        (OUTPUT | {"call_id": "gone"}, [ChatMessage("tool", "Snow.", tool_call_id="gone", name="unknown")]),
    ],
)
def test_other_items_of_the_history(item: dict[str, Any], kept: list[ChatMessage]) -> None:
    """They are kept, mapped to text, or left out: a refusal would repeat at every later turn."""
    assert messages(USER, item, USER)[1:-1] == kept


def test_a_compaction_of_another_server() -> None:
    """The model has to know that something is missing."""
    [first, _] = messages({"type": "compaction", "encrypted_content": "x"}, USER)
    assert first.role == "system"
    assert "compacted" in first.content
