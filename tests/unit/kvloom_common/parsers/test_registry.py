"""Families by name, and plugins from other distributions."""

from __future__ import annotations

import re
import sys

import pytest

from kvloom_common.parsers import registry
from kvloom_common.parsers.events import TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart, merge
from kvloom_common.parsers.output_parser import ParserSpec, ToolSchema, make_parser
from tests.conftest import REPOSITORY
from tests.fakes.plugin_site import PluginSite

GROUP = "kvloom.parsers"


def example_of_the_page(start: str) -> str:
    page = (REPOSITORY / "docs" / "reference" / "tool-calls.md").read_text()
    found = re.search(rf"```python\n({re.escape(start)}.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_of_the_page_is_a_plugin(plugin_site: PluginSite) -> None:
    """A reader who follows docs/reference/tool-calls.md gets a family that works, beside those of this package."""
    plugin_site.install(
        "acme_parsers", GROUP, {"acme": "acme_parsers:AcmeParser"}, example_of_the_page("# acme_parsers.py")
    )
    assert "acme" in registry.tool_families()
    assert "acme_parsers" not in sys.modules
    parser = make_parser(ParserSpec(tools="acme"), [ToolSchema("get_weather")])
    text = 'Hi. @call get_weather {"city": "Paris"} @call nope {}'
    assert merge([event for character in text for event in parser.feed(character)] + parser.finish()) == [
        TextDelta("Hi."),
        ToolCallStart(0, "get_weather"),
        ToolCallArguments(0, '{"city": "Paris"}'),
        ToolCallEnd(0),
        TextDelta(" @call nope {}"),
    ]
    assert registry.markers(ParserSpec(tools="acme")) == ("@call",)


def test_the_page_s_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """It is what a reader tries first."""
    exec(example_of_the_page("from kvloom"), {})
    assert "ToolCallArguments(index=0, text=': \"Paris\"}'), ToolCallEnd(index=0)" in capsys.readouterr().out


def test_a_plugin_of_reasoning_has_a_prefix(plugin_site: PluginSite) -> None:
    """The two kinds of families have names of their own: a model's may be equal."""
    source = (
        "from kvloom_common.parsers.core.text_input import Markers\n"
        "from kvloom_common.parsers.reasoning.marked import MarkedReasoningParser\n"
        "class Acme(MarkedReasoningParser):\n    pairs = {'<r>': Markers('</r>')}\n"
    )
    plugin_site.install("acme_parsers", GROUP, {"reasoning.acme": "acme_parsers:Acme"}, source)
    assert "acme" in registry.reasoning_families()
    assert "acme" not in registry.tool_families()
    parser = make_parser(ParserSpec(reasoning="acme"))
    assert parser.feed("<r>a</r>b")[-1] == TextDelta("b")


@pytest.mark.parametrize("spec", [ParserSpec(tools="nope"), ParserSpec(reasoning="nope")])
def test_an_unknown_family_is_refused_with_those_that_exist(spec: ParserSpec) -> None:
    """The message is what an operator sees who mistyped a name."""
    with pytest.raises(ValueError, match=r"named 'nope'\. There are: .*deepseek_r1, .*harmony"):
        make_parser(spec)


def test_harmony_cannot_be_combined() -> None:
    """Its channels hold both, so that a second family could only read what is not there."""
    with pytest.raises(ValueError, match="cannot be combined"):
        make_parser(ParserSpec(tools="harmony", reasoning="qwen3"))
    assert make_parser(ParserSpec(tools="harmony")).feed("<|channel|>final<|message|>a") == [TextDelta("a")]


def test_without_families_everything_is_text() -> None:
    """Such a parser is what an output needs that is not parsed."""
    parser = make_parser(ParserSpec(tools="", reasoning=None))
    assert parser.feed("<tool_call>") == [TextDelta("<tool_call>")]
    assert parser.feed("") == parser.finish() == []
    assert parser.num_tool_calls == 0


def test_without_tools_every_name_is_one() -> None:
    """Who parses without knowing the tools still wants the calls."""
    parser = make_parser(ParserSpec(tools="hermes"))
    assert parser.feed('<tool_call>{"name": "any", "arguments": {}}')[0] == ToolCallStart(0, "any")
    assert parser.num_tool_calls == 1


def test_what_follows_the_end_is_ignored() -> None:
    """An output ends once; a late text must not reopen it."""
    parser = make_parser(ParserSpec(tools="hermes", reasoning="qwen3"))
    parser.feed("<think>a")
    parser.finish()
    assert parser.feed("b") == parser.finish() == []


@pytest.mark.parametrize("name", registry.tool_families())
def test_families_name_their_markers(name: str) -> None:
    """The shard keeps exactly these special tokens in the text."""
    for marker in registry.markers(ParserSpec(tools=name)):
        assert marker == marker.strip() != ""
    if name not in ("json", "pythonic"):
        assert registry.markers(ParserSpec(tools=name))


def test_markers_of_both_kinds_are_named_once() -> None:
    """Granite's tags and Kimi's occur in both of their families."""
    found = registry.markers(ParserSpec(tools="harmony", reasoning="harmony"))
    assert len(found) == len(set(found))
    assert "<think>" in registry.markers(ParserSpec(tools="hermes", reasoning="qwen3"))
