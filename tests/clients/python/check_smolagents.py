"""smolagents' OpenAIModel, and its agent that calls tools."""

from __future__ import annotations

import openai
import pytest
import world
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import AgentGenerationError


def real(key=world.KEY, name=world.MODEL, **options):
    kwargs = {"max_retries": 0, "timeout": 60}
    limits = {"max_tokens": 200, "temperature": 0}
    return OpenAIModel(name, api_base=f"{world.URL}/v1", api_key=key, client_kwargs=kwargs, **limits | options)


@tool
def get_weather(city: str, unit: str) -> str:
    """The weather in a city.

    Args:
        city: The city's name.
        unit: C or F.
    """
    return "Snow."


def user(text):
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def test_plain():
    """An answer, with its usage."""
    answer = real().generate(user(world.CAPITAL))
    assert answer.content == world.PARIS
    assert answer.token_usage.output_tokens > 3


def test_streaming():
    """Deltas add up to the answer; the client asks for the usage by itself."""
    deltas = list(real().generate_stream(user(world.CAPITAL)))
    assert "".join(delta.content or "" for delta in deltas) == world.PARIS
    assert any(delta.token_usage for delta in deltas)


def test_required_tool():
    """The client demands a call whenever there are tools."""
    answer = real().generate(user(world.QUESTION), tools_to_call_from=[get_weather])
    assert answer.tool_calls[0].function.name == "get_weather"


def test_structured_output():
    """A schema as the response format."""
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": world.WEATHER_SCHEMA}}
    world.Weather.model_validate_json(real().generate(user(world.QUESTION), response_format=schema).content)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_round_trip(stream):
    """The agent's second step shows the model its call and the result; the scripted model then answers with text."""
    model = OpenAIModel(world.SCRIPTED_MODEL, api_base=f"{world.SCRIPTED_URL}/v1", api_key="none", tool_choice="auto")
    agent = ToolCallingAgent([get_weather], model, max_steps=1, stream_outputs=stream, verbosity_level=0)
    assert agent.run(world.QUESTION) == world.SNOWS


def test_errors():
    """Each status becomes an exception of OpenAI's client."""
    with pytest.raises(openai.AuthenticationError):
        real(key="wrong").generate(user("Hi"))
    with pytest.raises(openai.NotFoundError):
        real(name="none").generate(user("Hi"))
    with pytest.raises(openai.BadRequestError, match=world.TOO_LONG_WORDS):
        real().generate(user(world.TOO_LONG))
    with pytest.raises(AgentGenerationError):
        ToolCallingAgent([], real(key="wrong"), verbosity_level=0).run("Hi")


def test_abort():
    """Leaving the stream ends the request."""
    deltas = real(max_tokens=2000).generate_stream(user(world.LONG))
    next(delta for delta in deltas if delta.content)
    deltas.close()
    world.assert_becomes_idle()
