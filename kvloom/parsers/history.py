"""Checks and normalises the tool calls in a conversation (OpenAI's `messages`) for chat templates.

Clients send a call's arguments as JSON text, and templates expect an object. A message of the role "tool" answers one
call of the assistant's message before it, by its id; many templates also need the function's name there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


class HistoryError(ValueError):
    """The conversation's tool calls do not fit together. `field` is the path of what is wrong."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def normalise_history(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates need them: arguments are objects, and tools' answers have the function's name. Other
    fields stay as they are. Raises HistoryError."""
    normalised: list[dict[str, Any]] = []
    unanswered: dict[str, str] = {}  # the id of each call that waits for an answer, and the function's name
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        role = message.get("role")
        copy = dict(message)
        if role == "tool":
            copy["name"] = _answered(message, unanswered, path)
        elif unanswered:
            ids = ", ".join(unanswered)
            raise HistoryError(f"{path} must be a message of the role tool: these calls have no answer: {ids}.", path)
        elif role == "assistant" and message.get("tool_calls") is not None:
            copy["tool_calls"] = _calls(message["tool_calls"], f"{path}.tool_calls")
            unanswered = {call["id"]: call["function"]["name"] for call in copy["tool_calls"]}
            copy.setdefault("content", None)
        elif message.get("tool_calls") is not None:
            raise HistoryError("Only messages of the assistant have tool_calls.", f"{path}.tool_calls")
        normalised.append(copy)
    if unanswered:
        ids = ", ".join(unanswered)
        raise HistoryError(f"The conversation ends before these tool calls are answered: {ids}.", "messages")
    return normalised


def _answered(message: Mapping[str, Any], unanswered: dict[str, str], path: str) -> str:
    """The name of the function whose call a tool's message answers."""
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str) or not call_id:
        raise HistoryError("A message of the role tool needs the tool_call_id of its call.", f"{path}.tool_call_id")
    if call_id not in unanswered:
        raise HistoryError(f"No call with the id {call_id!r} waits for an answer here.", f"{path}.tool_call_id")
    return unanswered.pop(call_id)


def _calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes) or not calls:
        raise HistoryError("tool_calls must be a list of at least one call.", path)
    normalised = [_call(call, f"{path}[{i}]") for i, call in enumerate(calls)]
    ids = [call["id"] for call in normalised]
    for i, call_id in enumerate(ids):
        if call_id in ids[:i]:
            raise HistoryError(f"The id {call_id!r} occurs twice in one message.", f"{path}[{i}].id")
    return normalised


def _call(call: Any, path: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise HistoryError("A tool call must be an object.", path)
    call_id = call.get("id")
    if not isinstance(call_id, str) or not call_id:
        raise HistoryError("A tool call needs an id.", f"{path}.id")
    if call.get("type", "function") != "function":
        raise HistoryError("Only calls of the type function are served.", f"{path}.type")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise HistoryError("A tool call needs a function.", f"{path}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise HistoryError("A function needs a name.", f"{path}.function.name")
    arguments = _arguments(function.get("arguments", ""), f"{path}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any, path: str) -> dict[str, Any]:
    """An empty text is what some models' calls without arguments were stored as."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise HistoryError("The arguments must be the JSON text of an object.", path) from None
    if not isinstance(arguments, Mapping):
        raise HistoryError("The arguments must be the JSON text of an object.", path)
    return dict(arguments)
