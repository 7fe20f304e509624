"""Pydantic AI, with its models for chat completions, Responses and Anthropic's Messages."""

from __future__ import annotations

import asyncio

import pytest
import world
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"max_tokens": 200, "temperature": 0, "timeout": 60}


def chat(url, key, name):
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))


def responses(url, key, name):
    return OpenAIResponsesModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))


def messages(url, key, name):
    return AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key=key))


COMPLETIONS = pytest.mark.parametrize("make", [chat, messages])


def agent(make, key=world.KEY, name=world.MODEL, **options):
    return Agent(make(world.URL, key, name), model_settings=SETTINGS, retries=0, **options)


@COMPLETIONS
def test_plain(make):
    """An answer, with its usage."""
    assert_plain(make)


def test_responses():
    """The same agent, over the Responses API."""
    assert_plain(responses)


def assert_plain(make):
    result = agent(make).run_sync(world.CAPITAL)
    assert result.output == world.PARIS
    assert result.usage.output_tokens > 3


@COMPLETIONS
def test_streaming(make):
    """Deltas add up to the answer."""
    assert asyncio.run(streamed(make)) == world.PARIS


def test_responses_streaming():
    """The client puts the answer together from typed events."""
    assert asyncio.run(streamed(responses)) == world.PARIS


async def streamed(make):
    async with agent(make).run_stream(world.CAPITAL) as result:
        return "".join([text async for text in result.stream_text(delta=True, debounce_by=None)])


@COMPLETIONS
def test_required_tool(make):
    """The client's default way to structured output: a tool that has to be called."""
    assert_structured(make, ToolOutput(world.Weather))


def test_structured_output():
    """A schema as the answer's format. With Anthropic's API the client has it only for models that it knows."""
    assert_structured(chat, NativeOutput(world.Weather))


@pytest.mark.parametrize("output_type", [ToolOutput, NativeOutput])
def test_responses_structured_output(output_type):
    """Both ways, over the Responses API."""
    assert_structured(responses, output_type(world.Weather))


def assert_structured(make, output_type):
    assert isinstance(agent(make, output_type=output_type).run_sync(world.QUESTION).output, world.Weather)


@COMPLETIONS
def test_tool_round_trip(make):
    """The client's own loop of calls and results."""
    assert_round_trip(make)


def test_responses_tool_round_trip():
    """The items of the first response go back as input."""
    assert_round_trip(responses)


def assert_round_trip(make):
    cities = []
    scripted = Agent(make(world.SCRIPTED_URL, "none", world.SCRIPTED_MODEL))

    @scripted.tool_plain
    def get_weather(city: str, unit: str) -> str:
        cities.append(city)
        return "Snow."

    assert scripted.run_sync(world.QUESTION).output == world.SNOWS
    assert cities == ["Oslo"]


@pytest.mark.parametrize("make", [chat, responses, messages])
def test_errors(make):
    """The client keeps status and body."""
    for status, words, options in ((401, "key", {"key": "wrong"}), (404, "none", {"name": "none"})):
        with pytest.raises(ModelHTTPError, match=words) as caught:
            agent(make, **options).run_sync("Hi")
        assert caught.value.status_code == status
    with pytest.raises(ModelHTTPError, match=world.TOO_LONG_WORDS):
        agent(make).run_sync(world.TOO_LONG)


@COMPLETIONS
def test_abort(make):
    """Leaving the stream ends the request."""
    asyncio.run(abort(make))
    world.assert_becomes_idle()


async def abort(make):
    async with agent(make).run_stream(world.LONG, model_settings={"max_tokens": 2000}) as result:
        async for _ in result.stream_text(delta=True, debounce_by=None):
            return
