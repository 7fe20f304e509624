"""What parsing costs: proportional to the text, and memory bounded, whatever a model writes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest

from kvloom_common.parsers import registry
from kvloom_common.parsers.core.grammar_parser import GrammarParser
from kvloom_common.parsers.core.json_call import MAX_HEAD_CHARS
from kvloom_common.parsers.output_parser import ParserSpec, make_parser
from tests.unit.kvloom_common.parsers.corpus import TOOLS

HEADS = {
    "hermes": '<tool_call>{"name": "get_weather", "arguments": ',
    "llama3_json": '{"name": "get_weather", "parameters": ',
    "json": '{"name": "get_weather", "arguments": ',
    "mistral": "[TOOL_CALLS]get_weather[ARGS]",
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\n",
    "pythonic": "[get_weather(tags=",
    "glm45": "<tool_call>get_weather\n<arg_key>options</arg_key>\n<arg_value>",
}
UNITS = (
    "<tool_call",
    "<tool_call>",
    "{",
    "[",
    '{"a":',
    '"',
    "\\",
    " ",
    "\n",
    "a",
    "<",
    "</",
    '{"name": ',
    "<|channel|>",
)


def hostile_outputs(num_units: int) -> list[tuple[ParserSpec, str]]:
    found = [
        (ParserSpec(tools=family), head + unit * num_units)
        for family, head in HEADS.items()
        for unit in ('{"a":', "[", "x")
    ]
    found += [(ParserSpec(tools="hermes", reasoning="qwen3"), unit * num_units) for unit in UNITS]
    found += [(ParserSpec(tools="harmony", reasoning="harmony"), unit * num_units) for unit in UNITS]
    return found


def num_opcodes(work: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            count += 1
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
    return count


def work_of(spec: ParserSpec, pieces: Sequence[str]) -> int:
    def parse() -> None:
        parser = make_parser(spec, TOOLS)
        for piece in pieces:
            parser.feed(piece)
        parser.finish()

    return num_opcodes(parse)


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_work_grows_with_the_text(in_one_piece: bool) -> None:
    """A model (or who prompts it) must not be able to stop an edge: three times the text is three times the work."""
    for (spec, short), (_, long) in zip(hostile_outputs(10), hostile_outputs(30), strict=True):
        first, second = (work_of(spec, [text] if in_one_piece else list(text)) for text in (short, long))
        assert second <= 3.3 * first + 500, (spec, short[:80], first, second)


@pytest.mark.parametrize("family", registry.tool_families())
def test_little_text_is_kept(family: str) -> None:
    """However long an output is, a parser keeps one undecided head of it at most."""
    markers = registry.markers(ParserSpec(tools=family))[:1] or ("[",)
    for start in {"", HEADS.get(family, markers[0])}:
        for unit in ("{", '"', "a", " ", markers[0][:4]):
            parser = make_parser(ParserSpec(tools=family), TOOLS)
            assert isinstance(parser, GrammarParser)
            for piece in [start, *[unit * 2000] * 40]:
                parser.feed(piece)
            kept = len(parser.text) - parser.position + sum(map(len, parser.held))
            assert kept <= MAX_HEAD_CHARS + 2000


def test_plain_text_costs_a_few_bytecodes_a_delta() -> None:
    """Most deltas of an answer with tools are plain text; they must stay cheap."""
    parser = make_parser(ParserSpec(tools="hermes"), TOOLS)
    parser.feed("The")
    assert num_opcodes(lambda: [parser.feed(" rain") for _ in range(100)]) < 100 * 330
