"""The conversation of a `Generate`: its messages and tools, checked, and what they mean for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvloom.conversation.tools import (
    AUTO,
    MAX_SCHEMA_DEPTH,
    NONE,
    REQUIRED,
    Tool,
    ToolChoice,
    check_choice,
    check_tools,
)
from kvloom.errors import KvloomError, invalid_argument
from kvloom.text.chat_message import ChatMessage, ToolCall
from kvloom.v1 import router_service_pb2
from kvloom.v1.router_service_pb2 import GenerateRequest, Message
from kvloom_common.conversation.history import checked_messages, json_object
from kvloom_common.text.roles import template_role

MAX_MESSAGES: Final = 4096
MESSAGES: Final = "conversation.messages"
_MODES: Final[Mapping[int, ToolChoice]] = {
    router_service_pb2.TOOL_CHOICE_MODE_UNSPECIFIED: AUTO,
    router_service_pb2.TOOL_CHOICE_MODE_AUTO: AUTO,
    router_service_pb2.TOOL_CHOICE_MODE_NONE: NONE,
    router_service_pb2.TOOL_CHOICE_MODE_REQUIRED: REQUIRED,
}


def wanted_messages(wanted: GenerateRequest) -> list[ChatMessage]:
    """Raises KvloomError (INVALID_ARGUMENT) that names the field."""
    messages = wanted.conversation.messages
    if not messages:
        raise invalid_argument(f"{MESSAGES} must not be empty.", MESSAGES)
    if len(messages) > MAX_MESSAGES:
        raise invalid_argument(
            f"{MESSAGES} has {len(messages)} messages; at most {MAX_MESSAGES} are allowed.", MESSAGES
        )
    return checked_messages([_message(message, f"{MESSAGES}[{i}]") for i, message in enumerate(messages)])


def wanted_tools(wanted: GenerateRequest) -> tuple[Sequence[Tool], ToolChoice]:
    """Raises KvloomError (INVALID_ARGUMENT) that names the field."""
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(wanted.tools)]
    check_tools(tools, at="")
    choice = AUTO
    if wanted.HasField("tool_choice"):
        given = wanted.tool_choice
        if given.WhichOneof("choice") == "name":
            choice = ToolChoice("named", given.name)
        elif given.mode in _MODES:
            choice = _MODES[given.mode]
        else:  # The enum is open, so any number can arrive.
            raise invalid_argument(f"tool_choice has no mode {given.mode}.", "tool_choice")
    check_choice(choice, tools)
    return tools, choice


def template_options(wanted: GenerateRequest) -> Mapping[str, Any]:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    return json_object(wanted.template_options, "template_options") if wanted.template_options else {}


def check_only_for_conversations(wanted: GenerateRequest) -> None:
    """Raise KvloomError (INVALID_ARGUMENT) for what other prompts cannot have."""
    if wanted.tools or wanted.HasField("tool_choice") or wanted.template_options:
        field = "tools" if wanted.tools else "tool_choice" if wanted.HasField("tool_choice") else "template_options"
        raise invalid_argument(f"{field} goes only with a conversation.", field)


def conversation_error(error: KvloomError) -> KvloomError:
    """The tokenizer's field is "messages"; that of our callers is longer."""
    field = f"conversation.{error.field}" if error.field else ""
    return error.renamed(field, error.message)


def _message(message: Message, at: str) -> ChatMessage:
    role = template_role(message.role, f"{at}.role")
    if message.parts and message.content:
        raise invalid_argument(f"{at} has both content and parts.", f"{at}.parts")
    content = "".join(part.text for part in message.parts) if message.parts else message.content
    if not (message.tool_calls or message.tool_call_id or message.reasoning or role == "tool"):
        return ChatMessage(role, content)
    calls = [ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls]
    return ChatMessage(role, content, calls, message.tool_call_id, message.name, message.reasoning)


def _tool(tool: router_service_pb2.Tool, at: str) -> Tool:
    if not tool.parameters:
        return Tool(tool.name, tool.description, strict=tool.strict)
    schema = json_object(tool.parameters, f"{at}.parameters", MAX_SCHEMA_DEPTH)
    return Tool(tool.name, tool.description, schema, tool.strict)
