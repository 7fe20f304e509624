"""However a model's output is split into deltas, and wherever another edge takes the answer over, a message of
Anthropic's API is the same."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from edge_http.answers.shape import ResponseShape, formatter_of, parsed_outputs, shape_of
from edge_http.formatting.collected_choice import CollectedChoice, PartKind
from edge_http.formatting.response_formatter import ChoiceFinish, Envelope, ResponseFormatter
from edge_http.formatting.usage import Usage
from kvloom.conversation.tools import Tool
from kvloom_common.parsers.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom_common.parsers.spec import ParserSpec
from tests.fakes.tiny_tokenizer import model_tokenizer

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os\\"lo é"}}\n</tool_call>'
FRAGMENTS = ["<think>Hm \N{SLIGHTLY SMILING FACE}</think>", "Let me look.\n", CALL, "\n", CALL[:40], "<tool_call>", "x"]
USAGE = Usage(3, 5, 1)

texts = st.lists(st.sampled_from(FRAGMENTS), max_size=5).map("".join)
shapes = st.builds(
    lambda spec, single, omits: shape_of(
        "messages",
        spec,
        [Tool("get_weather")],
        is_text=spec is None,
        is_single_call=single,
        omits_thinking=omits,
    ),
    st.sampled_from([ParserSpec(tools="hermes", reasoning="qwen3"), ParserSpec(tools="hermes"), None]),
    st.booleans(),
    st.booleans(),
)


def formatter(shape: ResponseShape) -> ResponseFormatter:
    return formatter_of(shape, Envelope("msg_x", "tiny", "fp", 1, num_prompt_tokens=3, created=0), model_tokenizer())


def split(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def streamed(shape: ResponseShape, deltas: Sequence[str], taken_over_after: int | None = None) -> list[bytes]:
    """The events of a stream, of which another formatter sends those behind so many deltas."""
    format_ = formatter(shape)
    parsed = parsed_outputs(shape, 1)
    sent = list(format_.opening(0, 1))
    for number, delta in enumerate(deltas):
        if number == taken_over_after:
            format_, parsed = formatter(shape), parsed_outputs(shape, 1)
            format_.opening(0, 1)
            for before in deltas[:number]:
                format_.output(0, parsed[0].feed(before, 1) if parsed else [TextDelta(before)])
        sent += format_.output(0, parsed[0].feed(delta, 1) if parsed else [TextDelta(delta)])
    finish = ChoiceFinish("stop")
    if parsed:
        sent += format_.output(0, parsed[0].finish())
        finish = parsed[0].completed(finish)
    return [*sent, *format_.finish(0, finish, None), *format_.ending(lambda: USAGE, None)]


def collected(shape: ResponseShape, deltas: Sequence[str]) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    choice, format_, parsed = CollectedChoice(), formatter(shape), parsed_outputs(shape, 1)
    finish = ChoiceFinish("stop")
    for events in _outputs(parsed, deltas):
        for event in events:
            match event:
                case TextDelta():
                    choice.add(PartKind.TEXT, event.text)
                case ReasoningDelta():
                    choice.add(PartKind.REASONING, event.text)
                case ToolCallStart():
                    choice.begin_call(event.name, format_.call_id(0, event.index))
                case ToolCallArguments():
                    choice.extend(event.text)
                case _:
                    pass
    if parsed:
        finish = parsed[0].completed(finish)
    choice.finish_reason = finish.reason
    return json.loads(b"".join(format_.body([choice], USAGE, None)))


def _outputs(parsed: Sequence[Any], deltas: Sequence[str]) -> Iterator[Sequence[Event]]:
    for delta in deltas:
        yield parsed[0].feed(delta, 1) if parsed else [TextDelta(delta)]
    if parsed:
        yield parsed[0].finish()


def assembled(events: Sequence[bytes]) -> dict[str, Any]:
    """The message that a client makes of a stream; checks the order of its events."""
    message: dict[str, Any] = {}
    arguments: dict[int, str] = {}
    open_block: int | None = None
    for event in events:
        match = re.fullmatch(rb"event: (\w+)\ndata: (.*)", event)
        assert match
        data = json.loads(match[2])
        assert data["type"] == match[1].decode()
        match data["type"]:
            case "message_start":
                message = data["message"]
            case "content_block_start":
                assert open_block is None
                open_block = data["index"]
                assert open_block == len(message["content"])
                message["content"].append(data["content_block"])
            case "content_block_delta":
                assert data["index"] == open_block
                delta, block = data["delta"], message["content"][-1]
                if delta["type"] == "input_json_delta":
                    arguments[open_block] = arguments.get(open_block, "") + delta["partial_json"]
                else:
                    field = delta["type"].removesuffix("_delta")
                    block[field] += delta[field]
            case "content_block_stop":
                assert data["index"] == open_block
                open_block = None
            case "message_delta":
                message |= data["delta"]
                message["usage"] = data["usage"]
            case _:
                pass
    assert open_block is None
    for index, text in arguments.items():
        message["content"][index]["input"] = text
    return message


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Calls whose arguments were cut off are text in a body; a stream has begun them as calls."""
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = _value(block["input"])
    return message


def _value(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def has_whole_calls(message: dict[str, Any]) -> bool:
    try:
        return all(isinstance(_value(b["input"]), dict) for b in message["content"] if b["type"] == "tool_use")
    except ValueError:
        return False


@given(texts, shapes, st.lists(st.integers(0, 1000), max_size=12))
@example(
    CALL + "<think>a</think>" + CALL + "<think>b</think>x" + CALL + "y",
    shape_of(
        "messages",
        ParserSpec(tools="hermes", reasoning="qwen3"),
        [Tool("get_weather")],
        is_text=False,
        is_single_call=True,
        omits_thinking=False,
    ),
    [],
)
def test_any_split_gives_the_same_message(text: str, shape: ResponseShape, cuts: Sequence[int]) -> None:
    """A client's message may not depend on how an engine's steps cut the text, and streams and bodies agree."""
    whole = assembled(streamed(shape, [text]))
    assert assembled(streamed(shape, split(text, cuts))) == whole
    body = collected(shape, split(text, cuts))
    assert body == collected(shape, [text])
    if has_whole_calls(whole):
        assert body == comparable(whole)


@given(texts, shapes, st.lists(st.integers(0, 1000), max_size=12), st.integers(0, 12))
def test_a_formatter_that_takes_over_sends_the_rest(
    text: str, shape: ResponseShape, cuts: Sequence[int], after: int
) -> None:
    """Blocks that another edge has begun are ended with their numbers: the events are those of one edge."""
    deltas = split(text, cuts)
    assert streamed(shape, deltas, after) == streamed(shape, deltas)
