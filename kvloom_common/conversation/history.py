"""The checks of earlier messages that all APIs share: which fields go with which role, and what a call may hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvloom.conversation.json_depth import check_depth
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
    check_depth(value, field, MAX_ARGUMENTS_DEPTH)
    return value


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
    return turn_of_others(message.role, message.content, message.tool_call_id or None, at, names)


def turn_of_others(role: str, content: str, tool_call_id: str | None, at: str, names: Mapping[str, str]) -> ChatMessage:
    """A message that is not the assistant's. `names` has the tool of each call so far, by the call's id. Raises
    KvloomError (INVALID_ARGUMENT)."""
    field = f"{at}.tool_call_id"
    if role != "tool":
        if tool_call_id is not None:
            raise invalid_argument(f"{field} goes only with role tool.", field)
        return ChatMessage(role, content)
    if not tool_call_id:
        raise invalid_argument(f"{field} is missing.", field)
    if tool_call_id not in names:
        raise invalid_argument(f"{field}: no earlier message has a tool call {tool_call_id[:64]!r}.", field)
    return ChatMessage(role, content, tool_call_id=tool_call_id, name=names[tool_call_id])


def _checked_call(call: ToolCall, at: str) -> ToolCall:
    for name, value in (("id", call.id), ("name", call.name)):
        if not value:
            raise invalid_argument(f"{at}.{name} is missing.", f"{at}.{name}")
    return ToolCall(call.id, call.name, checked_arguments(call.arguments, f"{at}.arguments"))
