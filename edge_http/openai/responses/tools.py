"""The tools of a request, and the choice among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from edge_http.formatting.client_tools import CUSTOM_TOOL, ClientTool, GivenTools, custom_tool, flat_name
from edge_http.formatting.decoding import decode_body
from edge_http.openai.requests import OpenStruct
from edge_http.openai.responses.file_search import KIND as FILE_SEARCH
from edge_http.openai.responses.file_search import without_found
from edge_http.openai.responses.requests import ResponsesAllowedTool, ResponsesBody, ResponsesToolChoice
from kvloom.conversation.tools import AUTO, MAX_TOOLS, NONE, REQUIRED, Tool, ToolChoice, check_choice, check_tools
from kvloom.errors import invalid_argument, unsupported

_CALLED_KINDS: Final = ("function", "custom")
_MODES: Final = {"none": NONE, "auto": AUTO, "required": REQUIRED}


class FunctionTool(OpenStruct, kw_only=True):
    type: str
    name: str
    description: str | None = None
    parameters: Any = None
    """A JSON Schema of type object."""
    strict: bool | None = None
    output_schema: Any = None
    """Without effect: it describes results to programs that a server runs."""


class _Kind(msgspec.Struct):
    type: str


class ResponseTools(NamedTuple):
    """The tools that a body gives, and its choice among them."""

    tools: Sequence[Tool]
    """Those that the choice leaves."""
    choice: ToolChoice
    all_tools: Sequence[Any]
    """The tools as the response repeats them: a Tool, or what the body has."""
    numbers: Sequence[int] = ()
    """The places of the tools in the body."""
    client_tools: Mapping[str, ClientTool] = {}
    left_out: Sequence[str] = ()
    """See GivenTools."""


class _Namespace(msgspec.Struct):
    """Functions that belong together, such as those of one MCP server."""

    name: str
    description: str | None = None
    tools: list[msgspec.Raw] = []


_KIND: Final = msgspec.json.Decoder(_Kind)
_TOOL: Final = msgspec.json.Decoder(FunctionTool)
_NAMESPACE: Final = msgspec.json.Decoder(_Namespace)


def tools_of(body: ResponsesBody, *, searches_files: bool = False) -> ResponseTools:
    """`searches_files`: `file_search` is among the tools, and is no call of the model. Raises KvloomError
    (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    if len(body.tools or ()) > MAX_TOOLS:
        raise invalid_argument(f"tools has {len(body.tools or ())} entries; at most {MAX_TOOLS}.", "tools")
    given = GivenTools()
    shown: list[Any] = []
    for number, raw in enumerate(body.tools or ()):
        _add(given, shown, raw, number, searches_files=searches_files)
    tools = given.tools
    check_tools(tools, at="", numbers=given.numbers)
    wanted = None if searches_files and _is_search(body.tool_choice, tools) else body.tool_choice
    if not tools:
        if wanted is not None and wanted not in ("none", "auto"):
            check_choice(REQUIRED, (), "tool_choice")
        return ResponseTools((), NONE, shown, left_out=given.left_out)
    allowed, choice = _choice(wanted, tools)
    check_choice(choice, allowed)
    numbers = [given.numbers[tools.index(tool)] for tool in allowed]
    return ResponseTools(allowed, choice, shown, numbers, given.client_tools, given.left_out)


def _is_search(wanted: str | ResponsesToolChoice | None, tools: Sequence[Tool]) -> bool:
    """Returns True if a choice asks for the search in files, which is done anyway."""
    if isinstance(wanted, ResponsesToolChoice):
        return wanted.type == FILE_SEARCH
    return wanted == "required" and not tools


def _add(given: GivenTools, shown: list[Any], raw: msgspec.Raw, number: int, *, searches_files: bool) -> None:
    at = f"tools[{number}]"
    kind = decode_body(_KIND, raw, at).type
    if kind == "function":
        tool = _tool(raw, at)
        given.add(tool, number)
        shown.append(tool)
        return
    if kind == "custom":
        custom = decode_body(CUSTOM_TOOL, raw, at)
        mapped = custom_tool(custom.name, custom.description or "", custom.format)
        given.add(mapped, number, ClientTool(custom.name, is_custom=True))
    elif kind == "namespace":
        _add_namespace(given, decode_body(_NAMESPACE, raw, at), number)
    elif kind == FILE_SEARCH and searches_files:
        raw = without_found(raw)
    else:
        given.leave_out(kind)
        return
    shown.append(raw)


def _add_namespace(given: GivenTools, namespace: _Namespace, number: int) -> None:
    for place, raw in enumerate(namespace.tools):
        at = f"tools[{number}].tools[{place}]"
        kind = decode_body(_KIND, raw, at).type
        if kind != "function":
            given.leave_out(kind)
            continue
        tool = _tool(raw, at)
        flat = dataclasses.replace(tool, name=flat_name(namespace.name, tool.name), strict=False)
        given.add(flat, number, ClientTool(tool.name, namespace.name))


def _tool(raw: msgspec.Raw, at: str) -> Tool:
    tool = decode_body(_TOOL, raw, at)
    if tool.parameters is None:
        return Tool(tool.name, tool.description or "", strict=bool(tool.strict))
    parameters = (
        {} if tool.parameters in (True, []) and not tool.strict else tool.parameters
    )  # [] is PHP's empty object
    if not isinstance(parameters, dict):
        raise invalid_argument(f"{at}.parameters must be a JSON schema.", f"{at}.parameters")
    return Tool(tool.name, tool.description or "", parameters, bool(tool.strict))


def _choice(wanted: str | ResponsesToolChoice | None, tools: Sequence[Tool]) -> tuple[Sequence[Tool], ToolChoice]:
    """Returns the tools that the choice leaves, and the choice."""
    if wanted is None:
        return tools, AUTO
    if isinstance(wanted, str):
        if wanted not in _MODES:
            raise invalid_argument("tool_choice must be one of none, auto and required, or an object.", "tool_choice")
        return tools, _MODES[wanted]
    if wanted.type in _CALLED_KINDS:
        if wanted.name is None:
            raise invalid_argument("tool_choice.name is missing.", "tool_choice.name")
        return tools, ToolChoice("named", _model_name(wanted))
    if wanted.type != "allowed_tools":
        raise unsupported("tool_choice.type must be 'function', 'custom' or 'allowed_tools'.", "tool_choice.type")
    if wanted.mode is None or wanted.tools is None:
        field = "tool_choice.mode" if wanted.mode is None else "tool_choice.tools"
        raise invalid_argument(f"{field} is missing.", field)
    return _allowed(wanted, tools), _MODES[wanted.mode]


def _allowed(wanted: ResponsesToolChoice, tools: Sequence[Tool]) -> Sequence[Tool]:
    known = {tool.name for tool in tools}
    names: set[str] = set()
    for number, tool in enumerate(wanted.tools or ()):
        at = f"tool_choice.tools[{number}]"
        if tool.type not in _CALLED_KINDS:
            continue
        name = _model_name(tool)
        if name not in known:
            raise invalid_argument(f"{at}.name: there is no tool {name[:64]!r}.", f"{at}.name")
        names.add(name)
    return [tool for tool in tools if tool.name in names]


def _model_name(wanted: ResponsesToolChoice | ResponsesAllowedTool) -> str:
    """The model's name of a tool that the client names."""
    name = wanted.name or ""
    return flat_name(wanted.namespace, name) if wanted.namespace else name
