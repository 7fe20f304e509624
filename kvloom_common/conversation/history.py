"""Earlier messages of a conversation, as all APIs accept them.

A client repeats with every turn what it, other software and models have written before. A refusal of any of it would
end the conversation for good, so what a history holds is kept, mapped to something that a chat template can show, or
left out (docs/reference/http-api.md has the table). Only what the new turn itself asks for can be refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from kvloom.conversation.json_depth import check_depth
from kvloom.errors import KvloomError, invalid_argument
from kvloom.text.chat_message import ChatMessage, ToolCall

MAX_ARGUMENTS_DEPTH: Final = 64
MAX_COMPLETED_CHARS: Final = 128 * 1024
"""The arguments that were cut off have at most so many characters in one conversation: each takes a microsecond in the
worst case."""
WRAPPED: Final = "arguments"
"""The name under which an object holds arguments that are not an object themselves."""
UNNAMED: Final = "unknown"
"""Stands for the name of a tool that a history does not tell."""

_TOKEN: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?P<end>"|\\?\Z)|[{}\[\],]', re.DOTALL)
_CLOSING: Final = {"{": "}", "[": "]"}
_CUT_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def json_object(text: str, field: str, max_levels: int = MAX_ARGUMENTS_DEPTH) -> dict[str, Any]:
    """The JSON object that a field holds as text, nested in at most `max_levels` levels. Raises KvloomError
    (INVALID_ARGUMENT)."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"{field} is not valid JSON.", field) from error
    if not isinstance(value, dict):
        raise invalid_argument(f"{field} must be a JSON object.", field)
    check_depth(value, field, max_levels)
    return value


def call_arguments(text: str, max_completed_chars: int = MAX_COMPLETED_CHARS) -> str:
    """The arguments of an earlier call as a JSON object. Those that were cut off are completed, null and nothing become
    {}, and whatever else is no object, nested too deeply, or too long to be completed, becomes the one value of an
    object. Never raises."""
    if not text.strip():
        return "{}"
    try:
        value: Any = json.loads(text)
        if value is None:
            return "{}"
        check_depth(value, WRAPPED, MAX_ARGUMENTS_DEPTH)
    except (ValueError, RecursionError):
        text = (_completed(text) if len(text) <= max_completed_chars else None) or _wrapped(text)
    except KvloomError:
        text = _wrapped(text)
    else:
        if not isinstance(value, dict):
            text = _wrapped(value)
    return _without_surrogates(text) if _SURROGATE.search(text) else text


def _completed(text: str) -> str | None:
    """The JSON object whose text was cut off, with the brackets and quotes that close it. A member that has no value
    yet is left out. None for a text that is not the beginning of an object."""
    open_brackets: list[str] = []
    cut_string = ""
    whole_until, closing = 0, ""
    """Up to where nothing is incomplete, and the brackets that are open there."""
    for token in _TOKEN.finditer(text):
        match token[0][0]:
            case '"':
                if token["end"] != '"':  # the text ends within this string
                    cut_string = _CUT_ESCAPE.sub("", text) + '"' + _closed(open_brackets)
            case "{" | "[":
                open_brackets.append(token[0])
                if len(open_brackets) > MAX_ARGUMENTS_DEPTH:
                    return None
                whole_until, closing = token.end(), _closed(open_brackets)
            case ",":
                whole_until, closing = token.start(), _closed(open_brackets)
            case _:
                if open_brackets:
                    open_brackets.pop()
    if not (open_brackets or cut_string):
        return None
    candidates = (text + _closed(open_brackets), cut_string, text[:whole_until] + closing)
    return next((candidate for candidate in candidates if _is_object(candidate)), None)


def _closed(open_brackets: Sequence[str]) -> str:
    return "".join(_CLOSING[bracket] for bracket in reversed(open_brackets))


def _is_object(text: str) -> bool:
    try:
        json_object(text, WRAPPED)
    except KvloomError:
        return False
    return True


def _wrapped(value: Any) -> str:
    return json.dumps({WRAPPED: value}, ensure_ascii=False)


def _without_surrogates(text: str) -> str:
    """The JSON with U+FFFD for each half of a pair of surrogates, which no tokenizer can read."""
    plain = json.dumps(json.loads(text), ensure_ascii=False)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class KnownCalls:
    """The calls of a conversation so far, among which each result finds its own."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._unanswered: dict[str, None] = {}
        self._max_completed_chars = MAX_COMPLETED_CHARS

    def add(self, call_id: str | None, name: str | None, arguments: str) -> ToolCall:
        """A call of the assistant. One without an id gets one."""
        call_id = call_id or f"call_{len(self._names)}"
        name = name or UNNAMED
        self._names[call_id] = name
        self._unanswered[call_id] = None
        kept = call_arguments(arguments, self._max_completed_chars)
        if kept is not arguments:
            self._max_completed_chars -= len(arguments)
        return ToolCall(call_id, name, kept)

    def result(self, call_id: str | None, name: str | None, content: str) -> ChatMessage:
        """The message with the result of a call. One without an id belongs to the first call that has no result yet.
        One whose call is not in the conversation, for example because the client shortened it, is kept."""
        call_id = call_id or next(iter(self._unanswered), f"call_{len(self._names)}")
        self._unanswered.pop(call_id, None)
        return ChatMessage("tool", content, tool_call_id=call_id, name=self._names.get(call_id) or name or UNNAMED)


def checked_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages, with roles as chat templates know them already, whose calls and results belong together."""
    calls = KnownCalls()
    return [_checked(message, calls) for message in messages]


def _checked(message: ChatMessage, calls: KnownCalls) -> ChatMessage:
    if message.role == "tool":
        return calls.result(message.tool_call_id, message.name, message.content)
    if message.role != "assistant":
        return ChatMessage(message.role, message.content)
    made = [calls.add(call.id, call.name, call.arguments) for call in message.tool_calls]
    return ChatMessage("assistant", message.content, tool_calls=made, reasoning=message.reasoning)
