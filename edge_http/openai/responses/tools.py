"""The tools of a request, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from edge_http.formatting.decoding import decode_body
from edge_http.openai.requests import OpenStruct
from edge_http.openai.responses.requests import ResponsesBody, ToolChoiceBody
from kvloom.conversation.tools import AUTO, MAX_TOOLS, NONE, REQUIRED, Tool, ToolChoice, check_choice, check_tools
from kvloom.errors import invalid_argument, unsupported

_MODES: Final = {"none": NONE, "auto": AUTO, "required": REQUIRED}


class FunctionTool(OpenStruct, kw_only=True):
    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema of type object."""
    strict: bool | None = None
    output_schema: Any = None
    """Without effect: it describes results to programs that a server runs."""


class _Kind(msgspec.Struct):
    type: str


class ResponseTools(NamedTuple):
    """What a body says of tools."""

    tools: Sequence[Tool]
    """Those that the choice leaves."""
    choice: ToolChoice
    all_tools: Sequence[Tool]


_KIND: Final = msgspec.json.Decoder(_Kind)
_TOOL: Final = msgspec.json.Decoder(FunctionTool)


def tools_of(body: ResponsesBody) -> ResponseTools:
    """Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    given = body.tools or ()
    if len(given) > MAX_TOOLS:
        raise invalid_argument(f"tools has {len(given)} entries; at most {MAX_TOOLS}.", "tools")
    tools = [_tool(raw, f"tools[{number}]") for number, raw in enumerate(given)]
    check_tools(tools, at="")
    if not tools:
        if body.tool_choice is not None and body.tool_choice not in ("none", "auto"):
            check_choice(REQUIRED, (), "tool_choice")
        return ResponseTools((), NONE, ())
    allowed, choice = _choice(body.tool_choice, tools)
    check_choice(choice, allowed)
    return ResponseTools(allowed, choice, tools)


def _tool(raw: msgspec.Raw, at: str) -> Tool:
    kind = decode_body(_KIND, raw, at).type
    if kind != "function":
        raise unsupported(f"{at}.type: only tools of type 'function' are supported.", f"{at}.type")
    tool = decode_body(_TOOL, raw, at)
    if tool.parameters is None:
        return Tool(tool.name, tool.description or "", strict=bool(tool.strict))
    return Tool(tool.name, tool.description or "", tool.parameters, bool(tool.strict))


def _choice(wanted: str | ToolChoiceBody | None, tools: Sequence[Tool]) -> tuple[Sequence[Tool], ToolChoice]:
    """Returns the tools that the choice leaves, and the choice."""
    if wanted is None:
        return tools, AUTO
    if isinstance(wanted, str):
        if wanted not in _MODES:
            raise invalid_argument("tool_choice must be one of none, auto and required, or an object.", "tool_choice")
        return tools, _MODES[wanted]
    if wanted.type == "function":
        if wanted.name is None:
            raise invalid_argument("tool_choice.name is missing.", "tool_choice.name")
        return tools, ToolChoice("named", wanted.name)
    if wanted.type != "allowed_tools":
        raise unsupported("tool_choice.type must be 'function' or 'allowed_tools'.", "tool_choice.type")
    if wanted.mode is None or wanted.tools is None:
        field = "tool_choice.mode" if wanted.mode is None else "tool_choice.tools"
        raise invalid_argument(f"{field} is missing.", field)
    return _allowed(wanted, tools), _MODES[wanted.mode]


def _allowed(wanted: ToolChoiceBody, tools: Sequence[Tool]) -> Sequence[Tool]:
    known = {tool.name for tool in tools}
    names: set[str] = set()
    for number, tool in enumerate(wanted.tools or ()):
        at = f"tool_choice.tools[{number}]"
        if tool.type != "function":
            raise unsupported(f"{at}.type: only tools of type 'function' are supported.", f"{at}.type")
        if tool.name not in known:
            raise invalid_argument(f"{at}.name: there is no tool {(tool.name or '')[:64]!r}.", f"{at}.name")
        names.add(tool.name)
    return [tool for tool in tools if tool.name in names]
