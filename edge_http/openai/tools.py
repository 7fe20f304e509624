"""The tools of a chat request, and the choice among them: `tools` and `tool_choice`, and their predecessors `functions`
and `function_call`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from edge_http.formatting.decoding import decode_body
from edge_http.openai.requests import ChatBody, FunctionBody, NamedFunction, ToolBody, ToolChoiceBody
from kvloom.conversation.tools import AUTO, NONE, REQUIRED, Tool, ToolChoice, check_choice, check_tools
from kvloom.errors import KvloomError, invalid_argument, unsupported

_JSON: Final = msgspec.json.Decoder()


class ChatTools(NamedTuple):
    """What a body says of tools."""

    tools: Sequence[Tool]
    choice: ToolChoice
    is_parallel: bool
    """Several calls are wanted, not only allowed."""
    has_legacy_functions: bool


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
    tools = [_tool(tool, number) for number, tool in enumerate(body.tools or ())]
    check_tools(tools)
    tools, choice = _choice(body.tool_choice, tools)
    check_choice(choice, tools)
    return ChatTools(tools, choice, bool(body.parallel_tool_calls), has_legacy_functions=False)


def function_tool(function: FunctionBody, at: str) -> Tool:
    """`at` leads to the function in the body, e.g. "tools[0].function."."""
    parameters = function.parameters
    if bytes(parameters) not in (b"", b"null"):
        schema = decode_body(_JSON, parameters, f"{at}parameters")
        if not isinstance(schema, dict):
            raise invalid_argument(f"{at}parameters must be a JSON schema.", f"{at}parameters")
        return Tool(function.name, function.description or "", schema, bool(function.strict))
    return Tool(function.name, function.description or "", strict=bool(function.strict))


def _tool(tool: ToolBody, number: int) -> Tool:
    at = f"tools[{number}]"
    if tool.type != "function":
        raise unsupported(f"{at}.type: only tools of type 'function' are supported.", f"{at}.type")
    if tool.function is None:
        raise invalid_argument(f"{at}.function is missing.", f"{at}.function")
    return function_tool(tool.function, f"{at}.function.")


def _choice(wanted: str | ToolChoiceBody | None, tools: list[Tool]) -> tuple[list[Tool], ToolChoice]:
    """Returns the tools that the choice leaves, and the choice."""
    if wanted is None:
        return tools, AUTO
    if isinstance(wanted, str):
        return tools, _mode(wanted, "tool_choice")
    if wanted.type == "function":
        return tools, ToolChoice("named", _name(wanted.function, "tool_choice.function"))
    if wanted.type != "allowed_tools":
        raise unsupported("tool_choice.type must be 'function' or 'allowed_tools'.", "tool_choice.type")
    allowed = wanted.allowed_tools
    if allowed is None:
        raise invalid_argument("tool_choice.allowed_tools is missing.", "tool_choice.allowed_tools")
    names = {_name(tool.function, f"tool_choice.allowed_tools.tools[{i}]") for i, tool in enumerate(allowed.tools)}
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
