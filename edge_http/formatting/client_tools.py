"""Tools that a client knows by another name or in another form than the model, to which every tool is a function.

A tool that takes text (`custom` in OpenAI's APIs) is a function with the argument `input`. A tool within a namespace,
as Codex names those of an MCP server, is a function whose name begins with the namespace. Tools that servers run, and
kinds that are not known, are left out; a header of the response names them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from edge_http.formatting.json_bytes import Buffer
from kvloom.conversation.tools import Tool, is_tool_name

LEFT_OUT_TOOLS: Final = "x-kvloom-left-out-tools"
"""The kinds and names of the tools that the model was not told of, because they cannot be run or called here."""
INPUT: Final = "input"
"""The argument of a tool that takes text."""
_MAX_NAMED: Final = 16
"""Kinds and names of tools that the header has at most."""
_SEPARATOR: Final = "__"
_HEADER_SAFE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TEXT: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*)')
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class ClientTool(NamedTuple):
    """How the client knows a tool that the model knows by another name, or in another form."""

    name: str
    namespace: str = ""
    is_custom: bool = False


NO_CLIENT_TOOLS: Final[Mapping[str, ClientTool]] = {}


class GivenTools:
    """The tools of a body: what the model gets of them, and how the client knows them."""

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        self.numbers: list[int] = []
        """The places of the tools in the body."""
        self.client_tools: dict[str, ClientTool] = {}
        """By the name that the model knows, of tools whose client knows them otherwise."""
        self.left_out: list[str] = []
        """The kinds and names of those that the model does not get."""
        self._names: set[str] = set()

    def add(self, tool: Tool, number: int, client_tool: ClientTool | None = None) -> None:
        """`client_tool`: one that is mapped. It is left out if no model can call it."""
        if client_tool is not None:
            if not is_tool_name(tool.name) or tool.name in self._names:
                self.leave_out(tool.name)
                return
            self.client_tools[tool.name] = client_tool
        self._names.add(tool.name)
        self.tools.append(tool)
        self.numbers.append(number)

    def leave_out(self, kind: str) -> None:
        self.left_out.append(kind)


def left_out_headers(kinds: Iterable[str]) -> dict[str, str]:
    """The header that names the tools which the model did not get, if there are any."""
    named = list(dict.fromkeys(kind if _HEADER_SAFE.fullmatch(kind) else "other" for kind in kinds))
    return {LEFT_OUT_TOOLS: ", ".join(named[:_MAX_NAMED])} if named else {}


def flat_name(namespace: str, name: str) -> str:
    """The name of a function for a tool within a namespace."""
    return namespace + name if namespace.endswith(_SEPARATOR) else f"{namespace}{_SEPARATOR}{name}"


class CustomToolBody(msgspec.Struct):
    """A tool that takes text, as bodies describe it."""

    name: str
    description: str | None = None
    format: Any = None


CUSTOM_TOOL: Final = msgspec.json.Decoder(CustomToolBody)


def custom_tool(name: str, description: str, form: Any) -> Tool:
    """`form` is the tool's `format`: any text, or a grammar, which the model is told."""
    grammar = form.get("grammar", form) if isinstance(form, Mapping) else {}
    definition = grammar.get("definition") if isinstance(grammar, Mapping) else None
    says = {"type": "string"}
    if isinstance(definition, str):
        syntax = str(grammar.get("syntax", ""))[:32]
        says["description"] = f"Text that conforms to this grammar ({syntax}):\n{definition}"
    return Tool(name, description, {"type": "object", "properties": {INPUT: says}, "required": [INPUT]})


def options_of(client_tools: Mapping[str, ClientTool]) -> dict[str, Any]:
    """For ResponseShape's options; nothing if the client knows all tools as the model does."""
    return {"client_tools": {name: list(tool) for name, tool in client_tools.items()}} if client_tools else {}


def client_tools_of(options: Mapping[str, Any]) -> Mapping[str, ClientTool]:
    return {name: ClientTool(*given) for name, given in options.get("client_tools", {}).items()}


def custom_input(arguments: Buffer) -> str:
    """Returns the text that a tool which takes text is given. `arguments` is the content of a JSON string, and may be
    cut off."""
    text = msgspec.json.decode(b'"%b"' % bytes(arguments), type=str)
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return _cut_off_input(text)
    given = value.get(INPUT) if isinstance(value, dict) else None
    return given if isinstance(given, str) else text


def _cut_off_input(text: str) -> str:
    match = _TEXT.match(text)
    if match is None:
        return ""
    try:
        return _SURROGATE.sub("", json.loads(f'"{match[1]}"', strict=False))
    except ValueError:
        return match[1]
