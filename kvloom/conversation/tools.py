"""Tools that a model may call, and the choice among them, with the checks that all APIs share."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from kvloom.conversation.json_depth import check_depth
from kvloom.errors import invalid_argument

MAX_TOOLS: Final = 1024
"""More than any API allows: agents bring the tools of all their MCP servers."""
MAX_SCHEMA_DEPTH: Final = 128
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask its caller to run."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=lambda: dict(_NO_PARAMETERS))
    """The JSON Schema of the arguments, which are an object."""
    strict: bool = False
    """Calls must conform to the schema, also when the model is free to call or not."""

    def as_function(self) -> dict[str, Any]:
        """The form in which chat templates expect tools, which is OpenAI's."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclasses.dataclass(frozen=True, slots=True)
class ToolChoice:
    """Says if the model may or must call tools, and which."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""
    """The tool to call, with mode "named"."""


AUTO: Final = ToolChoice("auto")
NONE: Final = ToolChoice("none")
REQUIRED: Final = ToolChoice("required")


def is_tool_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def check_tools(
    tools: Sequence[Tool],
    field: str = "tools",
    at: str = "function.",
    schema: str = "parameters",
    numbers: Sequence[int] | None = None,
) -> None:
    """Raise KvloomError (INVALID_ARGUMENT) for tools that no model can call. `at` leads from a tool to its fields, of
    which `schema` has the schema of the arguments; `numbers` are the tools' places in the body."""
    if len(tools) > MAX_TOOLS:
        raise invalid_argument(f"{field} has {len(tools)} entries; at most {MAX_TOOLS}.", field)
    seen: set[str] = set()
    for number, tool in zip(numbers or range(len(tools)), tools, strict=True):
        where = f"{field}[{number}].{at}"
        if not is_tool_name(tool.name):
            raise invalid_argument(
                f"{where}name must have 1 to 128 letters, digits, underscores, dots or hyphens.", f"{where}name"
            )
        if tool.name in seen:
            raise invalid_argument(f"{where}name: there is more than one tool {tool.name!r}.", f"{where}name")
        seen.add(tool.name)
        if tool.strict and tool.parameters.get("type", "object") != "object":
            raise invalid_argument(f"{where}{schema} must be a schema of type object.", f"{where}{schema}")
        check_depth(tool.parameters, f"{where}{schema}", MAX_SCHEMA_DEPTH)


def check_choice(choice: ToolChoice, tools: Sequence[Tool], field: str = "tool_choice") -> None:
    """Raise KvloomError (INVALID_ARGUMENT) for a choice that these tools do not allow."""
    if choice.mode in ("required", "named") and not tools:
        raise invalid_argument(f"{field} asks for a call, but there are no tools.", field)
    if choice.mode == "named" and all(tool.name != choice.name for tool in tools):
        raise invalid_argument(f"{field}: there is no tool {choice.name[:64]!r}.", field)
