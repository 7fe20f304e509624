"""Structural tags are checked before a shard compiles them, and strict tools make only ones that pass."""

from __future__ import annotations

import json

import pytest

from kvloom.conversation.tools import Tool
from kvloom.errors import KvloomError
from kvloom.guide import MAX_SCHEMA_BYTES, MAX_TAGS, check_guide
from kvloom.v1.generation_pb2 import Guide, StructuralTag, StructuralTags
from kvloom_common.conversation.tool_plan import strict_guide
from kvloom_common.parsers.events import ToolCallArguments, ToolCallStart
from kvloom_common.parsers.output_parser import make_parser
from kvloom_common.parsers.spec import ParserSpec

OBJECT = '{"type": "object"}'


def tag(begin: str = "<a>", json_schema: str = OBJECT, end: str = "</a>") -> StructuralTag:
    return StructuralTag(begin=begin, json_schema=json_schema, end=end)


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 10_000},
        {"properties": {"price": {"multipleOf": 0.01}, "rate": {"multipleOf": 0.0025}, "packs": {"multipleOf": 12}}},
        {"allOf": [{"properties": {"price": {"multipleOf": 0.01}, "lot": {"multipleOf": 500}}}]},
        {"properties": {f"p{i}": {"multipleOf": 5} for i in range(500)}},
    ],
)
def test_schemas_with_usual_multiples_pass(schema: dict[str, object]) -> None:
    """The bound is for what keeps a compiler busy for seconds."""
    check_guide(Guide(json_schema=json.dumps(schema)), "f")


def test_the_multiples_of_all_tags_count_together() -> None:
    """Many tags would be a way around the bound of one schema."""
    tags = [tag(json_schema=json.dumps({"type": "object", "properties": {"a": {"multipleOf": 9973 - i}}}))
            for i in range(100)]  # fmt: skip
    with pytest.raises(KvloomError, match="multipleOf"):
        check_guide(Guide(structural_tags=StructuralTags(tags=tags, triggers=["<a>"])), "f")


LARGE = json.dumps({"type": "object", "description": "x" * (MAX_SCHEMA_BYTES // 2)})


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (StructuralTags(triggers=["<a>"]), "tags"),
        (StructuralTags(tags=[tag()] * (MAX_TAGS + 1), triggers=["<a>"]), "tags"),
        (StructuralTags(tags=[tag()]), "triggers"),
        (StructuralTags(tags=[tag()], triggers=["<a>", ""]), "1 to 256 bytes"),
        (StructuralTags(tags=[tag()], triggers=["<a>", "a"]), "contain another"),
        (StructuralTags(tags=[tag()], triggers=["<a>", "<a>"]), "contain another"),
        (StructuralTags(tags=[tag()], triggers=["<a>", "<b>"]), "no tag begins"),
        (StructuralTags(tags=[tag("<b>")], triggers=["<a>"]), "must begin"),
        (StructuralTags(tags=[tag(end="x" * 1025)], triggers=["<a>"]), "1024"),
        (StructuralTags(tags=[tag(json_schema="{")], triggers=["<a>"]), "not JSON"),
        (StructuralTags(tags=[tag(json_schema="true")], triggers=["<a>"]), "JSON object"),
        (StructuralTags(tags=[tag(json_schema=LARGE)] * 2, triggers=["<a>"]), "together"),
    ],
)
def test_bad_tags_are_refused(guide: StructuralTags, message: str) -> None:
    """A shard must not be the first to look at what a client sends."""
    with pytest.raises(KvloomError, match=message):
        check_guide(Guide(structural_tags=guide), "guide")


@pytest.mark.parametrize("family", ["hermes", "deepseek_r1", "deepseek_v3", "deepseek_v31"])
def test_a_guided_call_is_one_to_the_parser(family: str) -> None:
    """The guide of a family lets a model write only calls that the family's parser reads."""
    guide = strict_guide([Tool("f", strict=True), Tool("g")], family)
    assert guide is not None
    check_guide(guide, "tools")
    for number, one in enumerate(guide.structural_tags.tags):
        parser = make_parser(ParserSpec(tools=family))
        events = [*parser.feed(f'{one.begin}{{"x": 1}}{one.end}'), *parser.finish()]
        assert events[0] == ToolCallStart(0, "fg"[number])
        assert "".join(event.text for event in events if isinstance(event, ToolCallArguments)) == '{"x": 1}'
        assert parser.num_tool_calls == 1


def test_only_strict_tools_need_a_guide() -> None:
    """Free calls of free tools cost nothing."""
    assert strict_guide([Tool("f")], "hermes") is None
    assert strict_guide([Tool("f")], "pythonic") is None
    assert strict_guide([Tool("f", strict=True)], None) is None
