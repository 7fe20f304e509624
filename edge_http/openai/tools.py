"""The tools of a chat request, and the choice among them: `tools` and `tool_choice`, and their predecessors `functions`
and `function_call`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from edge_http.formatting.client_tools import CUSTOM_TOOL, ClientTool, GivenTools, custom_tool
from edge_http.formatting.decoding import decode_body
from edge_http.openai.requests import ChatBody, FunctionBody, NamedFunction, ToolBody, ToolChoiceBody
from kvloom.conversation.tools import AUTO, NONE, REQUIRED, Tool, ToolChoice, check_choice, check_tools
from kvloom.errors import KvloomError, invalid_argument, unsupported
from kvloom_common.conversation.call_guide import ToolPlace

_JSON: Final = msgspec.json.Decoder()


class ChatTools(NamedTuple):
    """The tools that a body gives, and its choice among them."""

    tools: Sequence[Tool]
    choice: ToolChoice
    is_parallel: bool
    """Several calls are wanted, not only allowed."""
    has_legacy_functions: bool
    numbers: Sequence[int] = ()
    """The places of the tools in the body."""
    client_tools: Mapping[str, ClientTool] = {}
    left_out: Sequence[str] = ()
    """See GivenTools."""


_NO_TOOLS = ChatTools((), NONE, is_parallel=False, has_legacy_functions=False)


def tools_of(body: ChatBody) -> ChatTools:
    """Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    if not (body.tools or body.functions):
        if body.tool_choice is not None and body.tool_choice not in ("none", "auto"):
            check_choice(REQUIRED, (), "tool_choice")
        if body.function_call is not None and body.function_call not in ("none", "auto"):
            check_choice(REQUIRED, (), "function_call")
        return _NO_TOOLS
    if body.functions:
        return _legacy(body, body.functions)
    given = GivenTools()
    for number, tool in enumerate(body.tools or ()):
        _add(given, tool, number)
    check_tools(given.tools, numbers=given.numbers)
    tools, choice = _choice(body.tool_choice, given.tools)
    check_choice(choice, tools)
    if not tools:
        choice = NONE
    return ChatTools(
        tools,
        choice,
        bool(body.parallel_tool_calls),
        has_legacy_functions=False,
        numbers=[given.numbers[given.tools.index(tool)] for tool in tools],
        client_tools=given.client_tools,
        left_out=given.left_out,
    )


def place_of(given: ChatTools) -> ToolPlace:
    if given.has_legacy_functions:
        return ToolPlace("functions", "")
    return ToolPlace(numbers=given.numbers)


def function_tool(function: FunctionBody, at: str) -> Tool:
    """`at` leads to the function in the body, e.g. "tools[0].function."."""
    parameters = function.parameters
    if bytes(parameters) not in (b"", b"null"):
        schema = decode_body(_JSON, parameters, f"{at}parameters")
        if schema in (True, []) and not function.strict:  # [] is PHP's empty object
            schema = {}
        if not isinstance(schema, dict):
            raise invalid_argument(f"{at}parameters must be a JSON schema.", f"{at}parameters")
        return Tool(function.name, function.description or "", schema, bool(function.strict))
    return Tool(function.name, function.description or "", strict=bool(function.strict))


def _add(given: GivenTools, tool: ToolBody, number: int) -> None:
    at = f"tools[{number}]"
    if tool.type == "function":
        if tool.function is None:
            raise invalid_argument(f"{at}.function is missing.", f"{at}.function")
        given.add(function_tool(tool.function, f"{at}.function."), number)
    elif tool.type == "custom":
        custom = decode_body(CUSTOM_TOOL, tool.custom, f"{at}.custom")
        mapped = custom_tool(custom.name, custom.description or "", custom.format)
        given.add(mapped, number, ClientTool(custom.name, is_custom=True))
    else:
        given.leave_out(tool.type)


def _choice(wanted: str | ToolChoiceBody | None, tools: list[Tool]) -> tuple[list[Tool], ToolChoice]:
    """Returns the tools that the choice leaves, and the choice."""
    if wanted is None:
        return tools, AUTO
    if isinstance(wanted, str):
        return tools, _mode(wanted, "tool_choice")
    if wanted.type == "function":
        return tools, ToolChoice("named", _name(wanted.function, "tool_choice.function"))
    if wanted.type == "custom":
        return tools, ToolChoice("named", _name(wanted.custom, "tool_choice.custom"))
    if wanted.type != "allowed_tools":
        raise unsupported("tool_choice.type must be 'function', 'custom' or 'allowed_tools'.", "tool_choice.type")
    allowed = wanted.allowed_tools
    if allowed is None:
        raise invalid_argument("tool_choice.allowed_tools is missing.", "tool_choice.allowed_tools")
    names = {
        _name(tool.function or tool.custom, f"tool_choice.allowed_tools.tools[{i}]")
        for i, tool in enumerate(allowed.tools)
        if tool.type in ("function", "custom")
    }
    if missing := names - {tool.name for tool in tools}:
        field = "tool_choice.allowed_tools.tools"
        raise invalid_argument(f"{field}: there is no tool {min(missing)[:64]!r}.", field)
    return [tool for tool in tools if tool.name in names], _mode(allowed.mode, "tool_choice.allowed_tools.mode")


def _mode(wanted: str, field: str) -> ToolChoice:
    modes = {"none": NONE, "auto": AUTO, "required": REQUIRED}
    if wanted not in modes:
        raise invalid_argument(f"{field} must be one of none, auto and required, or name a function.", field)
    return modes[wanted]


def _name(function: NamedFunction | None, field: str) -> str:
    if function is None:
        raise _missing_name(field)
    return function.name


def _missing_name(field: str) -> KvloomError:
    return invalid_argument(f"{field}.name is missing.", f"{field}.name")


def _legacy(body: ChatBody, functions: Sequence[FunctionBody]) -> ChatTools:
    if body.tools:
        raise invalid_argument("Give either tools or functions.", "functions")
    tools = [function_tool(function, f"functions[{number}].") for number, function in enumerate(functions)]
    check_tools(tools, "functions", "")
    wanted = body.function_call
    if wanted is None:
        choice = AUTO
    elif isinstance(wanted, str):
        if wanted not in ("none", "auto"):
            raise invalid_argument("function_call must be none, auto, or name a function.", "function_call")
        choice = _mode(wanted, "function_call")
    else:
        choice = ToolChoice("named", wanted.name)
    check_choice(choice, tools, "function_call")
    return ChatTools(tools, choice, is_parallel=False, has_legacy_functions=True)
