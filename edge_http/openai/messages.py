"""The messages of a chat request as those of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from edge_http.openai.requests import Message, ToolCallBody, message_text
from kvloom.errors import KvloomError, invalid_argument
from kvloom.text.chat_message import ChatMessage, ToolCall
from kvloom_common.conversation.history import checked_arguments, turn_of_others
from kvloom_common.text.roles import template_role


def chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    names: dict[str, str] = {}
    """The tool of each call so far, by the call's id."""
    return [_message(message, f"messages[{number}]", number, names) for number, message in enumerate(messages)]


def _message(message: Message, at: str, number: int, names: dict[str, str]) -> ChatMessage:
    role = template_role(message.role, f"{at}.role")
    if role == "assistant":
        return _assistant(message, at, number, names)
    if message.tool_calls or message.function_call or message.reasoning_content:
        raise _misplaced(message, at)
    content = message_text(message, number)
    if message.role == "function":
        if not message.name:
            raise invalid_argument(f"{at}.name is missing.", f"{at}.name")
        return ChatMessage(role, content, tool_call_id=message.name, name=message.name)
    return turn_of_others(role, content, message.tool_call_id, at, names)


def _misplaced(message: Message, at: str) -> KvloomError:
    names = ("tool_calls", "function_call", "reasoning_content")
    field = f"{at}.{next(name for name in names if getattr(message, name))}"
    return invalid_argument(f"{field} goes only with role assistant.", field)


def _assistant(message: Message, at: str, number: int, names: dict[str, str]) -> ChatMessage:
    calls = [_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        function, field = message.function_call, f"{at}.function_call.arguments"
        calls.append(ToolCall(function.name, function.name, checked_arguments(function.arguments, field)))
    names.update((call.id, call.name) for call in calls)
    has_content = message.content is not None or not calls
    return ChatMessage(
        "assistant",
        message_text(message, number) if has_content and message.refusal is None else message.refusal or "",
        tool_calls=tuple(calls),
        reasoning=message.reasoning_content or "",
    )


def _call(call: ToolCallBody, at: str) -> ToolCall:
    if call.type not in (None, "function") or call.function is None:
        raise invalid_argument(f"{at}.type: only calls of type 'function' are supported.", f"{at}.type")
    arguments = checked_arguments(call.function.arguments, f"{at}.function.arguments")
    return ToolCall(call.id, call.function.name, arguments)
