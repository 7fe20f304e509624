"""LangChain's ChatOpenAI, over chat completions and Responses."""

from __future__ import annotations

import openai
import pytest
import world
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

LIMITS = {"max_retries": 0, "timeout": 60, "max_tokens": 200, "temperature": 0}


def real(**options):
    return ChatOpenAI(
        **{"model": world.MODEL, "base_url": f"{world.URL}/v1", "api_key": world.KEY, **LIMITS, **options}
    )


def scripted(**options):
    url = f"{world.SCRIPTED_URL}/v1"
    return ChatOpenAI(model=world.SCRIPTED_MODEL, base_url=url, api_key="none", **LIMITS, **options)


@tool(args_schema=world.Weather)
def get_weather(city: str, unit: str) -> str:
    """The weather in a city."""
    return "Snow."


def streamed(model, prompt):
    """All chunks, put together by the client."""
    whole = None
    for chunk in model.stream(prompt):
        whole = chunk if whole is None else whole + chunk
    return whole


def test_plain():
    """An answer, with its usage."""
    answer = real().invoke(world.CAPITAL)
    assert answer.content == world.PARIS
    assert answer.usage_metadata["output_tokens"] > 3


def test_streaming():
    """Chunks add up to the answer; the client asks for the usage by itself."""
    answer = streamed(real(stream_usage=True), world.CAPITAL)
    assert answer.content == world.PARIS
    assert answer.usage_metadata["output_tokens"] > 3


def test_forced_tool():
    """A named tool."""
    [call] = real().bind_tools([get_weather], tool_choice="get_weather").invoke(world.QUESTION).tool_calls
    world.Weather.model_validate(call["args"])


def test_required_tool():
    """Any tool, in a stream."""
    [call] = streamed(real().bind_tools([get_weather], tool_choice="any"), world.QUESTION).tool_calls
    world.Weather.model_validate(call["args"])


@pytest.mark.parametrize("stream", [False, True])
def test_tool_round_trip(stream):
    """The model's own call, its result, and the answer."""
    assert_round_trip(scripted(streaming=stream))


def assert_round_trip(model):
    model = model.bind_tools([get_weather])
    messages = [HumanMessage(world.QUESTION)]
    first = model.invoke(messages)
    [call] = first.tool_calls
    assert call["args"]["city"] == "Oslo"
    second = model.invoke([*messages, first, ToolMessage("Snow.", tool_call_id=call["id"])])
    assert second.text == world.SNOWS


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(method):
    """Both ways to a pydantic model: a response format, and a named tool."""
    answer = real().with_structured_output(world.Weather, method=method).invoke(world.QUESTION)
    assert isinstance(answer, world.Weather)


def test_responses():
    """The same class, over the Responses API."""
    model = real(use_responses_api=True)
    assert model.invoke(world.CAPITAL).text == world.PARIS
    assert streamed(model, world.CAPITAL).text == world.PARIS


def test_responses_required_tool():
    """Any tool, in a stream of events."""
    model = real(use_responses_api=True).bind_tools([get_weather], tool_choice="any")
    [call] = streamed(model, world.QUESTION).tool_calls
    world.Weather.model_validate(call["args"])


def test_responses_tool_round_trip():
    """The items of the first response go back as input."""
    assert_round_trip(scripted(use_responses_api=True, store=False))


def test_responses_structured_output():
    """A pydantic model as the text's format."""
    answer = real(use_responses_api=True).with_structured_output(world.Weather).invoke(world.QUESTION)
    assert isinstance(answer, world.Weather)


def test_errors():
    """Each status becomes an exception that applications catch; one is LangChain's own."""
    with pytest.raises(openai.AuthenticationError):
        real(api_key="wrong").invoke("Hi")
    with pytest.raises(openai.NotFoundError):
        real(model="none").invoke("Hi")
    with pytest.raises(ContextOverflowError, match=world.TOO_LONG_WORDS):
        real().invoke(world.TOO_LONG)


def test_abort():
    """Leaving the stream ends the request."""
    chunks = real(max_tokens=2000).stream(world.LONG)
    next(chunk for chunk in chunks if chunk.content)
    chunks.close()
    world.assert_becomes_idle()
