"""Guides under which a model can only write valid calls: a JSON object, or an array of objects, with the name of a tool
and arguments that conform to its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvloom.conversation.tools import Tool
from kvloom.v1.generation_pb2 import Guide

MAX_PARALLEL_CALLS: Final = 16


def call_guide(tools: Sequence[Tool], *, is_parallel: bool) -> Guide:
    """The guide for one call of one of these tools, or, if `is_parallel`, for an array of one or more calls."""
    # A tool's schema is kept whole, so that a reference inside it still finds its target, only further down.
    definitions = {
        f"tool{number}": _moved(tool.parameters, f"#/$defs/tool{number}") for number, tool in enumerate(tools)
    }
    calls = [_call(tool.name, f"#/$defs/tool{number}") for number, tool in enumerate(tools)]
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = call
    if is_parallel:
        schema = {"type": "array", "items": call, "minItems": 1, "maxItems": MAX_PARALLEL_CALLS}
    return Guide(json_schema=json.dumps({**schema, "$defs": definitions}, ensure_ascii=False))


def _call(name: str, schema: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": schema}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(value: Any, place: str) -> Any:
    """A schema that stood at the root, with references that find their targets at `place`."""
    if isinstance(value, Mapping):
        return {key: _moved_entry(key, child, place) for key, child in value.items()}
    if isinstance(value, list):
        return [_moved(child, place) for child in value]
    return value


def _moved_entry(key: str, child: Any, place: str) -> Any:
    if key == "$ref" and isinstance(child, str) and child.startswith("#"):
        return place + child[1:]
    return _moved(child, place)
