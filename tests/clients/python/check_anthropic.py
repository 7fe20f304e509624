"""Anthropic's client for Python: the Messages API."""

from __future__ import annotations

import anthropic
import pytest
import world

client = anthropic.Anthropic(base_url=world.URL, api_key=world.KEY, max_retries=0, timeout=60)
scripted = anthropic.Anthropic(base_url=world.SCRIPTED_URL, api_key="none", max_retries=0, timeout=60)

ASK = {"model": world.MODEL, "max_tokens": 200}
GREEDY = {"extra_body": {"temperature": 0}}
"""The client's version has no such parameter any more."""
TOOL = {"name": "get_weather", "description": "The weather in a city.", "input_schema": world.WEATHER_SCHEMA}


def user(content):
    return [{"role": "user", "content": content}]


def call_of(message):
    return next(block for block in message.content if block.type == "tool_use")


def test_plain():
    """The shape of a message, with its usage."""
    answer = client.messages.create(**ASK, **GREEDY, messages=user([{"type": "text", "text": world.CAPITAL}]))
    assert answer.content[0].text == world.PARIS
    assert answer.stop_reason == "end_turn"


def test_streaming():
    """The client's accumulator needs events in Anthropic's order."""
    with client.messages.stream(**ASK, **GREEDY, messages=user(world.CAPITAL)) as stream:
        text = "".join(stream.text_stream)
        answer = stream.get_final_message()
    assert text == answer.content[0].text == world.PARIS
    assert answer.usage.output_tokens > 3


def test_forced_tool():
    """A named tool."""
    choice = {"type": "tool", "name": "get_weather"}
    answer = client.messages.create(**ASK, messages=user(world.QUESTION), tools=[TOOL], tool_choice=choice)
    world.Weather.model_validate(call_of(answer).input)


def test_required_tool():
    """Any tool, in a stream."""
    request = {**ASK, "messages": user(world.QUESTION), "tools": [TOOL], "tool_choice": {"type": "any"}}
    with client.messages.stream(**request) as stream:
        answer = stream.get_final_message()
    assert answer.stop_reason == "tool_use"
    world.Weather.model_validate(call_of(answer).input)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_round_trip(stream):
    """The client's own loop of calls and results."""

    @anthropic.beta_tool
    def get_weather(city: str, unit: str) -> str:
        """The weather in a city."""
        return "Snow."

    runner = scripted.beta.messages.tool_runner(
        model=world.SCRIPTED_MODEL, max_tokens=200, messages=user(world.QUESTION), tools=[get_weather], stream=stream
    )
    answer = runner.until_done()
    assert "".join(block.text for block in answer.content if block.type == "text") == world.SNOWS


def test_structured_output():
    """A pydantic model as the output's format."""
    answer = client.messages.parse(**ASK, messages=user(world.QUESTION), output_format=world.Weather)
    assert isinstance(answer.parsed_output, world.Weather)


def test_errors():
    """Each status becomes the client's own exception."""
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**ASK, messages=user("Hi"))
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="none", max_tokens=1, messages=user("Hi"))
    with pytest.raises(anthropic.BadRequestError, match=world.TOO_LONG_WORDS):
        client.messages.create(**ASK, messages=user(world.TOO_LONG))


def test_abort():
    """Leaving the stream ends the request."""
    with client.messages.stream(**{**ASK, "max_tokens": 2000}, messages=user(world.LONG)) as stream:
        next(iter(stream.text_stream))
    world.assert_becomes_idle()
