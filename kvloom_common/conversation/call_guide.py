"""Guides under which a model can only write valid calls: a JSON object, or an array of objects, with the name of a tool
and arguments that conform to its schema, as far as a guide can follow it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvloom.conversation.tools import Tool
from kvloom.errors import KvloomError, invalid_argument
from kvloom.guide import MAX_SCHEMA_BYTES, check_guide
from kvloom.v1.generation_pb2 import Guide
from kvloom_common.json_schema.objects import UnfollowableSchema
from kvloom_common.json_schema.simplify import ANY_OBJECT, Simplified, simplified

MAX_PARALLEL_CALLS: Final = 16
MAX_PARTS: Final = 3_000
"""Parts of all schemas together: some 30 ms."""
_CALL_BYTES: Final = 24
"""The text around a tool's name and its schema has about so many bytes; more where a schema is followed."""
_FOLLOWED_BYTES: Final = 200


class ToolPlace(NamedTuple):
    """How a body names the parts of its tools, for errors."""

    tools: str = "tools"
    at: str = "function."
    """Leads from a tool to its fields."""
    schema: str = "parameters"
    """The field of a tool that has the schema of its arguments."""
    numbers: Sequence[int] = ()
    """The places of the tools in the body, where some of the body's are left out."""

    def of(self, number: int, field: str) -> str:
        number = self.numbers[number] if self.numbers else number
        return f"{self.tools}[{number}].{self.at}{field}"


IN_FUNCTIONS: Final = ToolPlace()
"""The place of tools in chat completions."""


def call_guide(
    tools: Sequence[Tool], *, is_parallel: bool, place: ToolPlace = IN_FUNCTIONS, first_number: int = 0
) -> Guide:
    """The guide for one call of one of these tools, or, if `is_parallel`, for an array of one or more calls. Of a tool
    that is not strict, it follows what guides can follow. `first_number` is the first tool's in the body. Raises
    KvloomError (INVALID_ARGUMENT) that names the tool, the place and the keyword which make a strict one's schema
    impossible."""
    found = followed(tools, place, first_number)
    guide = _guide(tools, found, is_parallel=is_parallel)
    try:
        check_guide(guide, place.tools)
    except KvloomError:
        # All together they are too much, so those that need not be followed are not.
        found = [each if tool.strict else _ANY for tool, each in zip(tools, found, strict=True)]
        guide = _guide(tools, found, is_parallel=is_parallel)
        check_guide(guide, place.tools)
    return guide


def followed(tools: Sequence[Tool], place: ToolPlace, first_number: int = 0) -> list[Simplified]:
    """The tools' schemas as a guide follows them: those of strict tools whole, of others as far as there is room.
    Raises KvloomError (INVALID_ARGUMENT)."""
    num_parts_left = MAX_PARTS
    num_bytes_left = MAX_SCHEMA_BYTES - sum(len(tool.name) + _CALL_BYTES for tool in tools)
    found: list[Simplified] = []
    for number, tool in enumerate(tools, first_number):
        try:
            each = simplified(
                tool.parameters,
                is_lenient=not tool.strict,
                of_arguments=True,
                prefix=f"tool{number}_",
                max_parts=MAX_PARTS if tool.strict else num_parts_left,
            )
        except UnfollowableSchema as error:
            field = place.of(number, place.schema) + error.loss.path
            message = f"{field}: {error.loss.keyword!r} {error.loss.reason}; the tool {tool.name!r} is strict."
            raise invalid_argument(message, field) from error
        num_parts_left -= each.num_parts
        num_bytes = len(json.dumps(each.whole(), ensure_ascii=False).encode()) + _FOLLOWED_BYTES
        if num_bytes > num_bytes_left and not tool.strict:
            each, num_bytes = _ANY, 0
        num_bytes_left -= num_bytes
        found.append(each)
    return found


_ANY: Final = Simplified(dict(ANY_OBJECT), {}, ())


def _guide(tools: Sequence[Tool], schemas: Sequence[Simplified], *, is_parallel: bool) -> Guide:
    definitions: dict[str, Any] = {}
    relaxable: list[str] = []
    free: list[str] = []
    """The names of tools that may be called with any object."""
    for number, (tool, found) in enumerate(zip(tools, schemas, strict=True)):
        if found is _ANY:
            free.append(tool.name)
            continue
        definitions |= {f"tool{number}": found.schema, **found.definitions}
        if not tool.strict:
            relaxable.append(f"tool{number}")
    places = [(f"tool{number}", tool) for number, tool in enumerate(tools)]
    calls = [_call({"const": tool.name}, name) for name, tool in places if name in definitions]
    if free:
        definitions["any"] = dict(ANY_OBJECT)
        calls.append(_call({"enum": free}, "any"))
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = call
    if is_parallel:
        schema = {"type": "array", "items": call, "minItems": 1, "maxItems": MAX_PARALLEL_CALLS}
    text = json.dumps({**schema, "$defs": definitions}, ensure_ascii=False)
    return Guide(json_schema=text, relaxable_definitions=relaxable)


def _call(name: Mapping[str, Any], schema: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": name, "arguments": {"$ref": f"#/$defs/{schema}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
