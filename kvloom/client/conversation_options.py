"""The options of a conversation, as messages of the wire: its messages, its tools, and the choice among them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvloom.conversation.earlier import MEDIA, asked_message, omitted
from kvloom.conversation.tools import Tool, check_tools
from kvloom.errors import invalid_argument
from kvloom.text.chat_message import ChatMessage
from kvloom.v1 import router_service_pb2
from kvloom.v1.router_service_pb2 import GenerateRequest, Message

_MODES: Final[Mapping[str, router_service_pb2.ToolChoiceMode]] = {
    "auto": router_service_pb2.TOOL_CHOICE_MODE_AUTO,
    "none": router_service_pb2.TOOL_CHOICE_MODE_NONE,
    "required": router_service_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
_ONLY_FOR_CONVERSATIONS: Final = ("tools", "tool_choice", "parallel_tool_calls", "template_options")


def set_conversation(request: GenerateRequest, given: Mapping[str, Any]) -> None:
    """Raises KvloomError (INVALID_ARGUMENT) that names the option."""
    if "messages" not in given:
        for name in _ONLY_FOR_CONVERSATIONS:
            if name in given:
                raise invalid_argument(f"{name} goes only with messages.", name)
        return
    request.conversation.SetInParent()
    messages = list(given["messages"])
    asked = asked_message([_role(message) for message in messages])
    for i, message in enumerate(messages):
        _add_message(request.conversation.messages.add(), message, f"messages[{i}]", is_asked=i == asked)
    if "tools" in given:
        _set_tools(request, given["tools"])
    if "tool_choice" in given:
        _set_choice(request.tool_choice, given["tool_choice"])
    request.parallel_tool_calls = bool(given.get("parallel_tool_calls"))
    if "template_options" in given:
        request.template_options = _json(given["template_options"], "template_options")


def _role(message: ChatMessage | Mapping[str, Any]) -> str:
    return str(message.get("role") if isinstance(message, Mapping) else getattr(message, "role", ""))


def _add_message(added: Message, message: ChatMessage | Mapping[str, Any], field: str, *, is_asked: bool) -> None:
    try:
        if isinstance(message, ChatMessage):
            _add_chat_message(added, message)
        else:
            _add_mapping(added, message, is_asked=is_asked)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise invalid_argument(f"{field} must have a role and a content, both text.", field) from error


def _add_chat_message(added: Message, message: ChatMessage) -> None:
    added.role, added.content = message.role, message.content
    added.tool_call_id, added.name, added.reasoning = message.tool_call_id, message.name, message.reasoning
    for call in message.tool_calls:
        added.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)


def _add_mapping(added: Message, message: Mapping[str, Any], *, is_asked: bool) -> None:
    """A message in OpenAI's shape. Fields that other software has added to an earlier one are left out."""
    calls = message.get("tool_calls") or ()
    added.role = message["role"]
    content = message["content"] if is_asked else message.get("content") or ""
    added.content = (
        content if isinstance(content, str) else "".join(_part_text(part, is_asked=is_asked) for part in content)
    )
    for name in ("tool_call_id", "name"):
        setattr(added, name, message.get(name) or "")
    added.reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    for call in calls:
        function = call.get("function") or {}
        arguments = function.get("arguments") or ""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        added.tool_calls.add(id=call.get("id") or "", name=function.get("name") or "", arguments=text)


def _part_text(part: Mapping[str, Any], *, is_asked: bool) -> str:
    kind = part.get("type", "text")
    if kind in MEDIA and not is_asked:
        return omitted(MEDIA[kind])
    return part["text"] if is_asked else part.get("text") or part.get("refusal") or ""


def _set_tools(request: GenerateRequest, given: Sequence[Tool | Mapping[str, Any]]) -> None:
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    check_tools(tools, at="")
    for i, tool in enumerate(tools):
        parameters = _json(tool.parameters, f"tools[{i}].parameters")
        request.tools.add(name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict)


def _tool(given: Tool | Mapping[str, Any], field: str) -> Tool:
    if isinstance(given, Tool):
        return given
    try:
        if given.get("type", "function") != "function":
            raise invalid_argument(f"{field}.type must be function.", f"{field}.type")
        function = given.get("function", given)
        name, description = _text(function["name"]), _text(function.get("description") or "")
        parameters, strict = function.get("parameters"), bool(function.get("strict"))
        if parameters is None:
            return Tool(name, description, strict=strict)
        if not isinstance(parameters, Mapping):
            raise invalid_argument(f"{field}.parameters must be a mapping.", f"{field}.parameters")
        return Tool(name, description, parameters, strict)
    except (AttributeError, KeyError, TypeError) as error:
        raise invalid_argument(f"{field} must be a Tool, or a function in OpenAI's shape.", field) from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _set_choice(choice: router_service_pb2.ToolChoice, given: Any) -> None:
    if isinstance(given, str):
        if given not in _MODES:
            raise invalid_argument("tool_choice must be auto, none or required, or name a function.", "tool_choice")
        choice.mode = _MODES[given]
        return
    try:
        choice.name = given.get("function", given)["name"]
    except (AttributeError, KeyError, TypeError) as error:
        raise invalid_argument('tool_choice must be text, or {"name": a tool}.', "tool_choice") from error


def _json(value: Any, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid_argument(f"{field} cannot be written as JSON.", field) from error
