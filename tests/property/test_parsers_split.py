"""Output parsers give the same events however the text is split into deltas.

KVLOOM_PARSER_EXAMPLES sets how many examples each parser gets.
"""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom_common.parsers import registry
from kvloom_common.parsers.events import Event, TextDelta, ToolCallEnd, ToolCallStart, merge
from kvloom_common.parsers.output_parser import OutputParser, ParserSpec, make_parser
from tests.examples import num_examples
from tests.unit.kvloom_common.parsers.corpus import TOOLS, texts

EXAMPLES = settings(
    max_examples=int(os.environ.get("KVLOOM_PARSER_EXAMPLES", num_examples(200))),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TOOL_FAMILIES = [name for name in registry.tool_families() if name != "harmony"]
REASONING_FAMILIES = [name for name in registry.reasoning_families() if name != "harmony"]
SPECS = [
    *(ParserSpec(tools=name) for name in TOOL_FAMILIES),
    *(ParserSpec(reasoning=name) for name in REASONING_FAMILIES),
    ParserSpec(tools="harmony", reasoning="harmony"),
    ParserSpec(reasoning="harmony"),
    ParserSpec(reasoning="qwen3", starts_in_reasoning=True),
    ParserSpec(tools="hermes", reasoning="qwen3"),
    ParserSpec(tools="json", reasoning="deepseek_r1", starts_in_reasoning=True),
    ParserSpec(tools="granite", reasoning="granite"),
    ParserSpec(tools="mistral", reasoning="mistral"),
]
FRAGMENTS = (
    *(" ", "\n", "\n\n", "\t", " " * 70, "a", "Sure.", "\\", "\\n", "\\u00e9", "\\ud83d", "\\ude00", "\\x41", "\\N"),
    *(
        '"',
        "'",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ":",
        ",",
        ";",
        "=",
        "<",
        ">",
        "<|",
        "|>",
        "</",
        "```",
        "```json",
        "\n```",
    ),
    *("null", "true", "None", "True", "1", "-1.5e3", "1.", "0x1F", "é", "😀", '""', "''", "{}", "[]"),
    *(
        '{"name": "get_weather", "arguments": {',
        '"city": "Paris"',
        "}}",
        '"arguments": {"city": 1}, "name": "get_weather"}',
    ),
    *('{"name": "get_weather", "parameters": "', '"id": "abc"', '"name": ', '"arguments": ', "get_weather", "get_time"),
    *("get_weather(city=", "[get_time()", "days=3", "functools", "function", "functions.get_weather:0", "unknown"),
    *("<function=get_weather>", "<parameter=city>", "</parameter>", "</function>", "<function=", "<parameter="),
    *(" to=functions.get_weather", "commentary", "analysis", "final", "assistant", "json"),
    *("a" * 300, "9" * 1100, '"arguments": "', "\\ud83d\\ude00"),
    *("Here is my thought process:", "Here's my response:", "Here is "),
)


def markers_of(spec: ParserSpec) -> tuple[str, ...]:
    return registry.markers(spec) or ("<tool_call>",)


def output_of(spec: ParserSpec, program: bytes) -> str:
    """An output of a model, as a few bytes describe it: texts of the corpus, whole, cut and spliced, fragments of all
    grammars, markers cut anywhere, and noise. (Bytes are drawn ten times as fast as the parts one by one.)"""
    corpus, markers = texts(spec), markers_of(spec)
    alphabet = sorted(set("".join(markers) + "{}[]\"' \n:,\\au"))
    pieces: list[str] = []
    only_noise = program[:1] == b"\xff"
    for kind, first, second in zip(program[::3], program[1::3], program[2::3], strict=False):
        text = corpus[(first << 8 | second) % len(corpus)]
        marker = markers[first % len(markers)]
        match 7 if only_noise else kind % 8:
            case 0:
                pieces.append(text)
            case 1:
                pieces.append(text[: len(text) * (kind >> 3) // 32])
            case 2:
                pieces.append(text[len(text) * (kind >> 3) // 32 :])
            case 3:
                pieces.append(marker)
            case 4:
                pieces.append(marker[: second % len(marker)])
            case 5:
                pieces.append(marker[second % len(marker) :])
            case 6:
                pieces.append(FRAGMENTS[(first << 8 | second) % len(FRAGMENTS)])
            case _:
                pieces.append(alphabet[first % len(alphabet)] + alphabet[second % len(alphabet)])
    return "".join(pieces)


def cuts_of(text: str, cuts: bytes) -> list[str]:
    """The text in pieces, cut where the bytes say."""
    places = sorted(len(text) * place // 256 for place in cuts)
    return [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]


def events_after(parser: OutputParser, pieces: list[str]) -> list[Event]:
    return merge([event for piece in pieces for event in parser.feed(piece)])


def parsed(spec: ParserSpec, pieces: list[str]) -> list[Event]:
    parser = make_parser(spec, TOOLS)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merge(events + parser.finish())


def check_well_formed(events: list[Event]) -> None:
    open_index: int | None = None
    num_calls = 0
    for event in events:
        if isinstance(event, ToolCallStart):
            assert open_index is None
            assert event.index == num_calls
            assert event.name in {tool.name for tool in TOOLS}
            open_index = event.index
            num_calls += 1
        elif isinstance(event, ToolCallEnd):
            assert event.index == open_index
            open_index = None
        elif hasattr(event, "index"):
            assert event.index == open_index
            assert event.text
        else:
            assert open_index is None
            assert event.text
    assert open_index is None


def name_of(spec: ParserSpec) -> str:
    return f"{spec.tools}-{spec.reasoning}{'-inside' if spec.starts_in_reasoning else ''}"


@pytest.mark.hypothesis
@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_events_do_not_depend_on_the_split(spec: ParserSpec) -> None:
    """Clients' tool calls must not depend on how many tokens an engine step gave; nor, after any piece, may what has
    been emitted, since another process restores the parser from the text that was delivered."""

    @EXAMPLES
    @given(st.binary(min_size=6, max_size=24), st.binary(max_size=5))
    def check(program: bytes, cuts: bytes) -> None:
        text = output_of(spec, program)
        pieces = cuts_of(text, cuts)
        whole = parsed(spec, [text])
        check_well_formed(whole)
        assert parsed(spec, list(text)) == whole
        parser = make_parser(spec, TOOLS)
        so_far: list[Event] = []
        length = 0
        for piece in pieces:
            so_far += parser.feed(piece)
            length += len(piece)
            assert merge(so_far) == events_after(make_parser(spec, TOOLS), [text[:length]])
        assert merge(so_far + parser.finish()) == whole

    check()


@pytest.mark.hypothesis
@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_text_without_markers_passes_exactly(spec: ParserSpec) -> None:
    """An answer that calls nothing must arrive character by character as the model wrote it."""

    @settings(EXAMPLES, max_examples=EXAMPLES.max_examples // 10)
    @given(st.text(alphabet="abz .,\n\t😀é", max_size=200))
    def check(text: str) -> None:
        if spec.starts_in_reasoning or spec.reasoning == "deepseek_r1":
            return
        assert parsed(spec, [text]) == ([TextDelta(text)] if text else [])

    check()
