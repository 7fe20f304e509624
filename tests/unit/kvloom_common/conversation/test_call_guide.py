"""Demanded calls are guided by the tools' schemas, as far as a guide can follow them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvloom.conversation.tools import REQUIRED, Tool, ToolChoice, check_tools
from kvloom.errors import KvloomError
from kvloom.guide import MAX_SCHEMA_BYTES
from kvloom_common.conversation.tool_plan import plan_tools

IDS = {"type": "object", "properties": {"ids": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}}


def definitions(tools: list[Tool], **options: Any) -> dict[str, Any]:
    check_tools(tools)
    guide = plan_tools(tools, REQUIRED, **options).guide
    assert guide is not None
    return json.loads(guide.json_schema)["$defs"]


def test_a_tool_that_is_not_strict_refuses_nothing() -> None:
    """Its schema is a server's, which the caller cannot change: a keyword that no guide follows is dropped."""
    found = definitions([Tool("a", parameters=IDS), Tool("b", parameters=CITY)])
    assert found["tool0"]["properties"]["ids"] == {"type": "array", "items": {"type": "string"}}
    assert found["tool1"]["properties"]["city"] == {"enum": ["Oslo"]}


@pytest.mark.parametrize("choice", [REQUIRED, ToolChoice("named", "strict")])
def test_a_strict_tool_is_refused_with_its_name_the_place_and_the_keyword(choice: ToolChoice) -> None:
    """Its author has asked for what cannot be done."""
    tools = [Tool("a", parameters=IDS), Tool("strict", parameters=IDS, strict=True)]
    with pytest.raises(KvloomError) as caught:
        plan_tools(tools, choice)
    assert caught.value.field == "tools[1].function.parameters.properties.ids"
    assert "'uniqueItems'" in caught.value.message
    assert "'strict'" in caught.value.message


def test_many_large_schemas_are_followed_as_far_as_there_is_room() -> None:
    """Agents bring hundreds of tools: the first fit, the rest may be called with any object."""
    large = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(100)}}
    tools = [Tool(f"mcp__server__{i}", parameters=large) for i in range(300)]
    guide = plan_tools(tools, REQUIRED).guide
    assert guide is not None
    assert len(guide.json_schema) <= MAX_SCHEMA_BYTES
    found = json.loads(guide.json_schema)["$defs"]
    assert "p0" in found["tool0"]["properties"]
    assert "tool299" not in found
    assert "mcp__server__299" in guide.json_schema
    assert "tool0" in guide.relaxable_definitions


def test_multiples_that_are_too_much_together_are_dropped() -> None:
    """What would be refused in a schema of the caller's own must not end a session with servers' tools."""
    tools = [
        Tool(f"t{i}", parameters={"type": "object", "properties": {"n": {"type": "integer", "multipleOf": multiple}}})
        for i, multiple in enumerate((9973, 9967, 99991))
    ]
    found = definitions([*tools, Tool("s", parameters=CITY, strict=True)])
    assert "tool0" not in found
    assert found["any"] == {"type": "object"}
    assert found["tool3"]["properties"]["city"] == {"enum": ["Oslo"]}


def test_descriptions_take_no_room() -> None:
    """A guide has no use for them."""
    guide = plan_tools([Tool("a", parameters=CITY | {"description": "x" * MAX_SCHEMA_BYTES})], REQUIRED).guide
    assert guide is not None
    assert len(guide.json_schema) < 1000
