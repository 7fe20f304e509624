"""The tools of a request, and the choice among them: `tools` and `tool_choice`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from edge_http.anthropic.requests import MessagesToolChoice, PromptBody
from edge_http.formatting.client_tools import ClientTool, GivenTools
from edge_http.formatting.decoding import decode_body, json_text
from kvloom.conversation.tools import AUTO, NONE, REQUIRED, Tool, ToolChoice, check_choice, check_tools
from kvloom.errors import invalid_argument


class _ToolType(msgspec.Struct):
    type: str | None = None
    name: str | None = None


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
    """Without effect, like the next one: the model sees all tools, and inputs are always streamed."""
    eager_input_streaming: bool | None = None


_TYPE: Final = msgspec.json.Decoder(_ToolType)
_TOOL: Final = msgspec.json.Decoder(_ToolBody)


_COMMANDS: Final = {"enum": ["view", "create", "str_replace", "insert"]}
_FILE: Final = {
    "path": {"type": "string"},
    "file_text": {"type": "string"},
    "old_str": {"type": "string"},
    "new_str": {"type": "string"},
    "insert_line": {"type": "integer"},
    "insert_text": {"type": "string"},
    "view_range": {"type": "array", "items": {"type": "integer"}},
}
_CLIENT_RUN: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "bash": (
        "Runs a command in a shell whose state is kept; `restart` begins a new one.",
        {"type": "object", "properties": {"command": {"type": "string"}, "restart": {"type": "boolean"}}},
    ),
    "text_editor": (
        "Shows and edits text files.",
        {"type": "object", "properties": {"command": _COMMANDS, **_FILE}, "required": ["command", "path"]},
    ),
    "memory": (
        "Keeps notes in the files of a directory, /memories.",
        {
            "type": "object",
            "properties": {
                "command": {"enum": [*_COMMANDS["enum"], "delete", "rename"]},
                **_FILE,
                "old_path": {"type": "string"},
                "new_path": {"type": "string"},
            },
            "required": ["command"],
        },
    ),
}
"""The tools that a client runs although Anthropic has defined them, by their types' beginning: what Anthropic's models
know of them."""
_VERSIONED: Final = re.compile(r"([a-z_]+)_\d{8}")


class MessageTools(NamedTuple):
    """The tools that a body gives, and its choice among them."""

    tools: Sequence[Tool]
    choice: ToolChoice
    is_single_call: bool
    """At most one call is wanted."""
    numbers: Sequence[int]
    """The places of the tools in the body."""
    left_out: Sequence[str]
    """The kinds and names of those that the model does not get."""


def tools_of(body: PromptBody) -> MessageTools:
    """Raises KvloomError (INVALID_ARGUMENT) that names the field."""
    given = GivenTools()
    for number, raw in enumerate(body.tools or ()):
        _add(given, raw, number)
    tools = given.tools
    check_tools(tools, "tools", "", "input_schema", given.numbers)
    wanted = body.tool_choice
    choice = _choice(wanted) if wanted is not None else AUTO
    check_choice(choice, tools)
    is_single = wanted is not None and bool(wanted.disable_parallel_tool_use)
    return MessageTools(tools, choice if tools else NONE, is_single, given.numbers, given.left_out)


def _add(given: GivenTools, raw: msgspec.Raw, number: int) -> None:
    at = f"tools[{number}]"
    head = decode_body(_TYPE, raw, at)
    kind = head.type
    if kind in (None, "custom"):
        body = decode_body(_TOOL, raw, at)
        if body.allowed_callers is not None and "direct" not in body.allowed_callers:
            given.leave_out(body.name)  # only a program that a server runs may call it
        else:
            given.add(_tool(body, at), number)
        return
    versioned = _VERSIONED.fullmatch(kind)
    known = _CLIENT_RUN.get(versioned[1]) if versioned is not None else None
    if known is None or not head.name:
        given.leave_out(kind)
        return
    description, schema = known
    given.add(Tool(head.name, description, schema), number, ClientTool(head.name))


def _tool(body: _ToolBody, at: str) -> Tool:
    description = body.description or ""
    if body.input_examples:
        examples = "\n".join(json_text(example, f"{at}.input_examples") for example in body.input_examples)
        description = f"{description}\n\nExamples of inputs:\n{examples}".lstrip()
    return Tool(body.name, description, body.input_schema, bool(body.strict))


def _choice(wanted: MessagesToolChoice) -> ToolChoice:
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
