"""The tools of a request, and the choice among them: `tools` and `tool_choice`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from edge_http.anthropic.requests import PromptBody, ToolChoiceBody
from edge_http.formatting.decoding import decode_body, json_text
from kvloom.conversation.tools import AUTO, NONE, REQUIRED, Tool, ToolChoice, check_choice, check_tools
from kvloom.errors import invalid_argument, unsupported


class _ToolType(msgspec.Struct):
    type: str | None = None


class _ToolBody(msgspec.Struct, kw_only=True):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any]
    type: str | None = None
    description: str | None = None
    input_examples: list[msgspec.Raw] | None = None
    strict: bool | None = None
    cache_control: Any = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    """Accepted and ignored: inputs are always streamed while they are generated."""


_TYPE: Final = msgspec.json.Decoder(_ToolType)
_TOOL: Final = msgspec.json.Decoder(_ToolBody)


class MessageTools(NamedTuple):
    """What a body says of tools."""

    tools: Sequence[Tool]
    choice: ToolChoice
    is_single_call: bool
    """At most one call is wanted."""


def tools_of(body: PromptBody) -> MessageTools:
    """Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    tools = [_tool(raw, f"tools[{number}]") for number, raw in enumerate(body.tools or ())]
    check_tools(tools, "tools", "", "input_schema")
    wanted = body.tool_choice
    choice = _choice(wanted) if wanted is not None else AUTO
    check_choice(choice, tools)
    is_single = wanted is not None and bool(wanted.disable_parallel_tool_use)
    return MessageTools(tools, choice if tools else NONE, is_single)


def _tool(raw: msgspec.Raw, at: str) -> Tool:
    kind = decode_body(_TYPE, raw, at).type
    if kind not in (None, "custom"):
        field = f"{at}.type"
        raise unsupported(
            f"{field}: tools of type {kind[:64]!r} are not supported, only those that a client defines.", field
        )
    body = decode_body(_TOOL, raw, at)
    if body.defer_loading:
        raise unsupported(f"{at}.defer_loading is not supported: the model sees all tools.", f"{at}.defer_loading")
    if body.allowed_callers is not None and "direct" not in body.allowed_callers:
        raise unsupported(f"{at}.allowed_callers: only 'direct' is supported.", f"{at}.allowed_callers")
    description = body.description or ""
    if body.input_examples:
        examples = "\n".join(json_text(example, f"{at}.input_examples") for example in body.input_examples)
        description = f"{description}\n\nExamples of inputs:\n{examples}".lstrip()
    return Tool(body.name, description, body.input_schema, bool(body.strict))


def _choice(wanted: ToolChoiceBody) -> ToolChoice:
    if wanted.name is not None and wanted.type != "tool":
        raise invalid_argument("tool_choice.name goes only with type: tool.", "tool_choice.name")
    match wanted.type:
        case "auto":
            return AUTO
        case "none":
            return NONE
        case "any":
            return REQUIRED
        case "tool":
            if not wanted.name:
                raise invalid_argument("tool_choice.name is missing.", "tool_choice.name")
            return ToolChoice("named", wanted.name)
