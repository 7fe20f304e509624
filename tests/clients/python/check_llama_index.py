"""LlamaIndex's OpenAILike, and its OpenAIResponses."""

from __future__ import annotations

import openai
import pytest
import world
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike

LIMITS = {"max_retries": 0, "timeout": 60, "temperature": 0}


def real(**options):
    server = {"model": world.MODEL, "api_base": f"{world.URL}/v1", "api_key": world.KEY, "max_tokens": 200}
    kind = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 8192}
    return OpenAILike(**{**server, **kind, **LIMITS, **options})


def get_weather(city: str, unit: str) -> str:
    """The weather in a city."""
    return "Snow."


TOOL = FunctionTool.from_defaults(get_weather)
PROMPT = PromptTemplate(world.QUESTION)


def user(text):
    return [ChatMessage(role="user", content=text)]


def test_plain():
    """A chat, and a plain completion, which this client offers as well."""
    assert real().chat(user(world.CAPITAL)).message.content == world.PARIS
    completed = real(is_chat_model=False).complete("The capital of France is", max_tokens=5)
    assert "Paris" in completed.text


def test_streaming():
    """Deltas add up to the answer."""
    assert "".join(chunk.delta or "" for chunk in real().stream_chat(user(world.CAPITAL))) == world.PARIS


def test_forced_tool():
    """A named function."""
    answer = real().chat_with_tools([TOOL], user_msg=world.QUESTION, tool_choice="get_weather")
    [call] = real().get_tool_calls_from_response(answer)
    assert {"city", "unit"} == call.tool_kwargs.keys()


def test_required_tool():
    """Any function, in a stream."""
    llm = real()
    *_, last = llm.stream_chat_with_tools([TOOL], user_msg=world.QUESTION, tool_required=True)
    [call] = llm.get_tool_calls_from_response(last)
    assert {"city", "unit"} == call.tool_kwargs.keys()


def test_tool_round_trip():
    """The model's own call, its result, and the answer."""
    url = f"{world.SCRIPTED_URL}/v1"
    kind = {"is_chat_model": True, "is_function_calling_model": True}
    llm = OpenAILike(model=world.SCRIPTED_MODEL, api_base=url, api_key="none", **kind, **LIMITS)
    first = llm.chat_with_tools([TOOL], user_msg=world.QUESTION)
    [call] = llm.get_tool_calls_from_response(first)
    assert call.tool_kwargs["city"] == "Oslo"
    result = ChatMessage(role="tool", content="Snow.", additional_kwargs={"tool_call_id": call.tool_id})
    second = llm.chat_with_tools([TOOL], chat_history=[*user(world.QUESTION), first.message, result])
    assert second.message.content == world.SNOWS


def test_structured_output():
    """A pydantic model, which this client gets by a required function."""
    assert isinstance(real().structured_predict(world.Weather, PROMPT), world.Weather)


def test_structured_output_as_format():
    """A schema as the response format."""
    llm = real(should_use_structured_outputs=True)
    assert isinstance(llm.structured_predict(world.Weather, PROMPT), world.Weather)


def responses():
    server = {"api_base": f"{world.URL}/v1", "api_key": world.KEY, "max_output_tokens": 200, "context_window": 8192}
    return OpenAIResponses(model=world.MODEL, **server, **LIMITS)


def test_responses():
    """The Responses API, whole and in typed events."""
    assert responses().chat(user(world.CAPITAL)).message.content == world.PARIS
    assert "".join(chunk.delta or "" for chunk in responses().stream_chat(user(world.CAPITAL))) == world.PARIS


def test_errors():
    """Each status becomes an exception of OpenAI's client."""
    with pytest.raises(openai.AuthenticationError):
        real(api_key="wrong").chat(user("Hi"))
    with pytest.raises(openai.NotFoundError):
        real(model="none").chat(user("Hi"))
    with pytest.raises(openai.BadRequestError, match=world.TOO_LONG_WORDS):
        real().chat(user(world.TOO_LONG))


def test_abort():
    """Leaving the stream ends the request."""
    chunks = real(max_tokens=2000).stream_chat(user(world.LONG))
    next(chunk for chunk in chunks if chunk.delta)
    chunks.close()
    world.assert_becomes_idle()
