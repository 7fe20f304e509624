"""LiteLLM, with its providers for OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import json

import litellm
import pytest
import world

OPENAI = {"model": f"openai/{world.MODEL}", "api_base": f"{world.URL}/v1"}
ANTHROPIC = {"model": f"anthropic/{world.MODEL}", "api_base": world.URL}
LIMITS = {"api_key": world.KEY, "max_tokens": 200, "temperature": 0, "timeout": 60, "num_retries": 0, "max_retries": 0}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": world.WEATHER_SCHEMA}}
BOTH = pytest.mark.parametrize("api", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])


def user(text):
    return [{"role": "user", "content": text}]


@BOTH
def test_plain(api):
    """An answer, with its usage."""
    answer = litellm.completion(**api, **LIMITS, messages=user(world.CAPITAL))
    assert answer.choices[0].message.content == world.PARIS
    assert answer.usage.completion_tokens > 3


@BOTH
def test_streaming(api):
    """Chunks add up to the answer."""
    chunks = litellm.completion(**api, **LIMITS, messages=user(world.CAPITAL), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == world.PARIS


@BOTH
def test_forced_tool(api):
    """A named function."""
    assert_call(api, {"type": "function", "function": {"name": "get_weather"}})


@BOTH
def test_required_tool(api):
    """Any function."""
    assert_call(api, "required")


def assert_call(api, choice):
    request = {**api, **LIMITS, "messages": user(world.QUESTION), "tools": [TOOL], "tool_choice": choice}
    [call] = litellm.completion(**request).choices[0].message.tool_calls
    world.Weather.model_validate_json(call.function.arguments)


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_tool_round_trip(api):
    """The model's own call, its result, and the answer."""
    url = world.SCRIPTED_URL + ("/v1" if api == "openai" else "")
    scripted = {"model": f"{api}/{world.SCRIPTED_MODEL}", "api_base": url, "api_key": "none", "tools": [TOOL]}
    messages = user(world.QUESTION)
    first = litellm.completion(**scripted, messages=messages).choices[0].message
    [call] = first.tool_calls
    assert json.loads(call.function.arguments)["city"] == "Oslo"
    assert first.reasoning_content == "I have to look."
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Snow."}]
    assert litellm.completion(**scripted, messages=messages).choices[0].message.content == world.SNOWS


@BOTH
def test_structured_output(api):
    """A pydantic model as the response format."""
    answer = litellm.completion(**api, **LIMITS, messages=user(world.QUESTION), response_format=world.Weather)
    world.Weather.model_validate_json(answer.choices[0].message.content)


def test_responses():
    """OpenAI's Responses API."""
    answer = litellm.responses(**OPENAI, api_key=world.KEY, input=world.CAPITAL, temperature=0)
    assert answer.output[0].content[0].text == world.PARIS


@BOTH
def test_errors(api):
    """Each status becomes the client's own exception; the length of the prompt is found by the words."""
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**api, **{**LIMITS, "api_key": "wrong"}, messages=user("Hi"))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**api, "model": api["model"].replace(world.MODEL, "none")}, **LIMITS, messages=user("Hi"))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**api, **LIMITS, messages=user(world.TOO_LONG))
