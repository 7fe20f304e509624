"""The checks of earlier messages that all APIs share: which fields go with which role, and what a call may hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from kvloom.errors import invalid_argument
from kvloom.text.chat_message import ChatMessage, ToolCall

MAX_ARGUMENTS_DEPTH: Final = 64


def checked_arguments(arguments: str, field: str) -> str:
    """The arguments of a call in the history, which have to be a JSON object. An empty text stands for none. Raises
    KvloomError (INVALID_ARGUMENT)."""
    if not arguments.strip():
        return "{}"
    json_object(arguments, field)
    return arguments


def json_object(text: str, field: str) -> dict[str, Any]:
    """The JSON object that a field holds as text. Raises KvloomError (INVALID_ARGUMENT)."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"{field} is not valid JSON.", field) from error
    if not isinstance(value, dict):
        raise invalid_argument(f"{field} must be a JSON object.", field)
    check_depth(value, field)
    return value


def check_depth(value: Any, field: str) -> None:
    """Raise KvloomError (INVALID_ARGUMENT) for JSON that is nested too deeply to be walked through."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_ARGUMENTS_DEPTH:
            raise invalid_argument(f"{field} is nested more than {MAX_ARGUMENTS_DEPTH} levels deep.", field)
        level = [child for node in level for child in _children(node)]


def checked_messages(messages: Sequence[ChatMessage], field: str) -> list[ChatMessage]:
    """The messages, with roles as chat templates know them already, whose calls and results have been checked. A result
    without a name gets that of its call. Raises KvloomError (INVALID_ARGUMENT) that names the field."""
    names: dict[str, str] = {}
    """The tool of each call so far, by the call's id."""
    return [_checked(message, f"{field}[{number}]", names) for number, message in enumerate(messages)]


def _checked(message: ChatMessage, at: str, names: dict[str, str]) -> ChatMessage:
    if message.role == "assistant":
        calls = [_checked_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
        names.update((call.id, call.name) for call in calls)
        return ChatMessage("assistant", message.content, tool_calls=calls, reasoning=message.reasoning)
    if message.tool_calls or message.reasoning:
        name = "tool_calls" if message.tool_calls else "reasoning"
        raise invalid_argument(f"{at}.{name} goes only with role assistant.", f"{at}.{name}")
    if message.role != "tool":
        if message.tool_call_id:
            raise invalid_argument(f"{at}.tool_call_id goes only with role tool.", f"{at}.tool_call_id")
        return ChatMessage(message.role, message.content)
    call_id = message.tool_call_id
    if not call_id:
        raise invalid_argument(f"{at}.tool_call_id is missing.", f"{at}.tool_call_id")
    if call_id not in names:
        field = f"{at}.tool_call_id"
        raise invalid_argument(f"{field}: no earlier message has a tool call {call_id[:64]!r}.", field)
    return ChatMessage("tool", message.content, tool_call_id=call_id, name=names[call_id])


def _checked_call(call: ToolCall, at: str) -> ToolCall:
    for name, value in (("id", call.id), ("name", call.name)):
        if not value:
            raise invalid_argument(f"{at}.{name} is missing.", f"{at}.{name}")
    return ToolCall(call.id, call.name, checked_arguments(call.arguments, f"{at}.arguments"))


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []
