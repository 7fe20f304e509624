"""With a response format a model that is free to call writes the form, or calls, and nothing else."""

from __future__ import annotations

import json

import pytest

from kvloom.conversation.tools import AUTO, Tool
from kvloom.v1.generation_pb2 import SamplingParams
from kvloom_common.conversation.tool_plan import plan_tools
from kvloom_common.parsers.spec import ParserSpec
from shard_server.engines.base import Capability, Guide, GuideKind
from shard_server.submits import guide_of
from tests.fakes.tiny_guides import accepts

FORM = json.dumps({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
CALL = '<tool_call>\n{"name": "f", "arguments": {"q": 1}}\n</tool_call>'
STRICT = {"type": "object", "properties": {"q": {"type": "boolean"}}, "required": ["q"]}


def guide(family: str, *tools: Tool) -> Guide | None:
    found = plan_tools(tools or [Tool("f")], AUTO, model=ParserSpec(tools=family)).or_form(FORM)
    return None if found is None else guide_of(SamplingParams(guide=found))


@pytest.mark.parametrize(
    ("family", "text", "is_allowed"),
    [
        ("hermes", '{"a": "x"}', True),
        ("hermes", CALL, True),
        ("hermes", f"{CALL}\n{CALL}\n", True),
        ("hermes", "hello", False),
        ("hermes", '{"b": "x"}', False),
        ("hermes", f'{{"a": "x"}}{CALL}', False),
        ("hermes", CALL.replace('"f"', '"g"'), False),
        ("mistral", '{"a": "x"}', True),
        ("mistral", '[TOOL_CALLS][{"name": "f"}]', True),
        ("mistral", "[1]", False),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", True),
        ("deepseek_r1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f", True),
    ],
)
def test_an_answer_is_the_form_or_calls(family: str, text: str, is_allowed: bool) -> None:
    """OpenAI's format is about messages: clients send it with tools and expect calls."""
    found = guide(family)
    assert found is not None
    assert accepts(found, text) is is_allowed


def test_a_strict_tool_s_call_conforms() -> None:
    """Beside a form as well."""
    found = guide("hermes", Tool("f", parameters=STRICT, strict=True))
    assert found is not None
    assert not accepts(found, CALL)
    assert accepts(found, CALL.replace('{"q": 1}', '{"q": true}'))


@pytest.mark.parametrize("family", ["pythonic", "json", ""])
def test_where_calls_look_like_json_the_form_holds(family: str) -> None:
    """A guide could not tell them apart."""
    assert guide(family) is None


def test_a_shard_without_structural_tags_allows_the_form_alone() -> None:
    """It served such requests before, and an answer without calls is better than none."""
    found = plan_tools([Tool("f")], AUTO, model=ParserSpec(tools="hermes")).or_form(FORM)
    assert guide_of(SamplingParams(guide=found), {Capability.GUIDED}) == Guide(GuideKind.JSON_SCHEMA, FORM)
