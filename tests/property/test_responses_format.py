"""However an output arrives, the Responses API gives the same items, and a stream that another edge continues has the
same events."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edge_http.answers.parsed_output import CountedOutputParser
from edge_http.formatting.collected_choice import CollectedChoice, PartKind
from edge_http.formatting.response_formatter import ChoiceFinish, Envelope
from edge_http.formatting.usage import Usage
from edge_http.openai.responses.formatter import ResponsesFormatter
from edge_http.openai.responses.steady_formatter import MAX_CHARS, RUN, SteadyFormatter
from kvloom_common.parsers.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom_common.parsers.output_parser import make_parser
from kvloom_common.parsers.spec import ParserSpec
from tests.fakes.tiny_tokenizer import model_tokenizer

SPEC = ParserSpec(tools="hermes", reasoning="qwen3")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é\\n"}}\n</tool_call>'
STRETCHES = ["<think>", "</think>", "Hm.", " ", "\n\n", "text", '"é🙂', CALL, CALL[:30], "<tool_call>", "<"]
TEXTS = st.lists(st.sampled_from(STRETCHES), max_size=8).map("".join)
REASONS = st.sampled_from(["stop", "length", "content_filter"])
USAGE = Usage(5, 7, 2, 1)


def formatter() -> ResponsesFormatter:
    envelope = Envelope("resp_1", "tiny", "fp", 1, created=1)
    return ResponsesFormatter(envelope, model_tokenizer(), {"echo": b'{"store":false}'})


def parsed() -> CountedOutputParser:
    return CountedOutputParser(make_parser(SPEC))


def split(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=12))) if text else []
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def steady() -> ResponsesFormatter:
    run = {"id": "resp_2", "created_at": 7, "seed": 1}
    envelope = Envelope("resp_1", "tiny", "fp", 1, created=1)
    return SteadyFormatter(envelope, model_tokenizer(), {"echo": b'{"store":true}', RUN: run})


def stream(pieces: Sequence[str], reason: str, make: Callable[[], ResponsesFormatter] = formatter) -> list[bytes]:
    made, output = make(), parsed()
    events = [*made.opening(0, 0)]
    for piece in pieces:
        events += made.output(0, output.feed(piece, 1))
    return events + end(made, output, reason)


def end(made: ResponsesFormatter, output: CountedOutputParser, reason: str) -> list[bytes]:
    events = [*made.output(0, output.finish())]
    events += made.finish(0, output.completed(ChoiceFinish(reason)), None)
    return [*events, *made.ending(lambda: USAGE, None)]


def data_of(event: bytes) -> Any:
    return json.loads(event.partition(b"\ndata: ")[2])


def final(events: Sequence[bytes]) -> Any:
    return data_of(events[-1])["response"] | {"completed_at": None}


def whole_body(text: str, reason: str) -> Any:
    choice, output, made = CollectedChoice(), parsed(), formatter()
    collect(choice, made, [*output.feed(text, 1), *output.finish()])
    choice.finish_reason = output.completed(ChoiceFinish(reason)).reason
    return json.loads(b"".join(made.body([choice], USAGE, None))) | {"completed_at": None}


def collect(choice: CollectedChoice, made: ResponsesFormatter, events: Sequence[Event]) -> None:
    for event in events:
        match event:
            case TextDelta():
                choice.add(PartKind.TEXT, event.text)
            case ReasoningDelta():
                choice.add(PartKind.REASONING, event.text)
            case ToolCallStart():
                choice.begin_call(event.name, made.call_id(0, event.index))
            case ToolCallArguments():
                choice.extend(event.text)
            case _:
                pass


@given(TEXTS, REASONS, st.data())
def test_any_split_gives_the_same_response(text: str, reason: str, data: st.DataObject) -> None:
    """The last event of a stream and the body of a response agree, and so do the deltas."""
    events = stream(split(data, text), reason)
    response = final(events)
    assert response == whole_body(text, reason)
    decoded = [data_of(event) for event in events]
    assert [event["sequence_number"] for event in decoded] == list(range(len(events)))
    for index, item in enumerate(response["output"]):
        deltas = [event["delta"] for event in decoded if "delta" in event and event["output_index"] == index]
        content = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(deltas) == content
        [done] = [event for event in decoded if event["type"].endswith("item.done") and event["output_index"] == index]
        assert done["item"] == item


@given(TEXTS, REASONS, st.data())
def test_a_continued_stream_has_the_same_events(text: str, reason: str, data: st.DataObject) -> None:
    """Another edge sees the output again, split otherwise, and continues with the events that are left."""
    pieces = split(data, text)
    num_before = data.draw(st.integers(0, len(pieces)))
    first, output = formatter(), parsed()
    events = [*first.opening(0, 0)]
    for piece in pieces[:num_before]:
        events += first.output(0, output.feed(piece, 1))
    second, again = formatter(), parsed()
    second.opening(0, 0)
    for piece in split(data, "".join(pieces[:num_before])):
        second.output(0, again.feed(piece, 1))
    second.restore(len(events))
    for piece in pieces[num_before:]:
        events += second.output(0, again.feed(piece, 1))
    events += end(second, again, reason)
    expected = stream(pieces, reason)
    assert events[:-1] == expected[:-1]
    assert final(events) == final(expected)


@given(TEXTS, REASONS, st.data())
def test_a_background_response_has_the_same_events_however_it_was_split(
    text: str, reason: str, data: st.DataObject
) -> None:
    """It may be generated more than once, by engines whose tokens come in other portions, and its readers compare."""
    events = stream(split(data, text), reason, steady)
    again = stream(split(data, text), reason, steady)
    assert events[:-1] == again[:-1]
    assert final(events) == final(again)
    plain = final(stream([text], reason))
    shown = [{**item, "id": ""} for item in final(events)["output"]]
    assert [{**item, "call_id": ""} for item in shown] == [
        {**item, "id": "", "call_id": ""} for item in plain["output"]
    ]
    assert (final(events)["id"], final(events)["created_at"]) == ("resp_2", 7)
    deltas = [data_of(event)["delta"] for event in events if b".delta\n" in event]
    assert all(0 < len(delta) <= MAX_CHARS for delta in deltas)
