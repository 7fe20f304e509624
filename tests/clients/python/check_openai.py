"""OpenAI's client for Python: chat completions and Responses."""

from __future__ import annotations

import json

import openai
import pytest
import world

client = openai.OpenAI(base_url=f"{world.URL}/v1", api_key=world.KEY, max_retries=0, timeout=60)
scripted = openai.OpenAI(base_url=f"{world.SCRIPTED_URL}/v1", api_key="none", max_retries=0, timeout=60)

ASK = {"model": world.MODEL, "temperature": 0, "max_tokens": 200}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": world.WEATHER_SCHEMA, "strict": True}}
FLAT_TOOL = {"type": "function", "name": "get_weather", "parameters": world.WEATHER_SCHEMA, "strict": True}


def user(content):
    return [{"role": "user", "content": content}]


def test_plain():
    """The shape of an answer, with its usage."""
    answer = client.chat.completions.create(**ASK, messages=user(world.CAPITAL))
    assert answer.choices[0].message.content == world.PARIS
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_plain_with_fields_without_effect():
    """What applications written for OpenAI send along must not be refused."""
    answer = client.chat.completions.create(
        model=world.MODEL,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "text", "text": world.CAPITAL}], "name": "alice"},
        ],
        max_completion_tokens=20,
        metadata={"task": "geography"},
        n=1,
        parallel_tool_calls=True,
        reasoning_effort="low",
        seed=1,
        service_tier="auto",
        store=None,
        user="alice",
    )
    assert len(answer.choices) == 1


def test_streaming():
    """The client's accumulator needs chunks as OpenAI's."""
    options = {"stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**ASK, **options, messages=user(world.CAPITAL)) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        answer = stream.get_final_completion()
    assert text == answer.choices[0].message.content == world.PARIS
    assert answer.usage.completion_tokens > 3


def test_forced_tool():
    """A named function, its arguments parsed by the client."""
    choice = {"type": "function", "function": {"name": "get_weather"}}
    tool = openai.pydantic_function_tool(world.Weather, name="get_weather")
    answer = client.chat.completions.parse(**ASK, messages=user(world.QUESTION), tools=[tool], tool_choice=choice)
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, world.Weather)


def test_required_tool():
    """A demanded call in a stream, put together by the client."""
    request = {**ASK, "messages": user(world.QUESTION), "tools": [TOOL], "tool_choice": "required"}
    with client.chat.completions.stream(**request) as stream:
        [choice] = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    world.Weather.model_validate_json(choice.message.tool_calls[0].function.arguments)


def test_tool_round_trip():
    """The model's own call, its result, and the answer."""
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": world.WEATHER_SCHEMA}}
    messages = user(world.QUESTION)
    first = scripted.chat.completions.create(model=world.SCRIPTED_MODEL, messages=messages, tools=[tool])
    [call] = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] == "Oslo"
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Snow."}]
    second = scripted.chat.completions.create(model=world.SCRIPTED_MODEL, messages=messages, tools=[tool])
    assert second.choices[0].message.content == world.SNOWS


def test_structured_output():
    """A pydantic model as the response format."""
    answer = client.chat.completions.parse(**ASK, messages=user(world.QUESTION), response_format=world.Weather)
    assert isinstance(answer.choices[0].message.parsed, world.Weather)


def test_responses():
    """An answer of the Responses API, and its output_text."""
    answer = client.responses.create(model=world.MODEL, input=world.CAPITAL, temperature=0)
    assert answer.output_text == world.PARIS


def test_responses_typed_events():
    """The client puts a snapshot together from the events, and fails if one is missing."""
    with client.responses.stream(model=world.MODEL, input=world.CAPITAL, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        answer = stream.get_final_response()
    assert text == answer.output_text == world.PARIS


def test_responses_structured_output():
    """A pydantic model as the text's format."""
    request = {"model": world.MODEL, "input": world.QUESTION, "max_output_tokens": 200}
    assert isinstance(client.responses.parse(**request, text_format=world.Weather).output_parsed, world.Weather)


def test_responses_forced_tool():
    """A named function, streamed."""
    choice = {"type": "function", "name": "get_weather"}
    request = {"model": world.MODEL, "input": world.QUESTION, "tools": [FLAT_TOOL], "tool_choice": choice}
    with client.responses.stream(**request) as stream:
        [call] = [item for item in stream.get_final_response().output if item.type == "function_call"]
    world.Weather.model_validate_json(call.arguments)


def test_responses_tool_round_trip():
    """The output's items, reasoning among them, go back as input."""
    tool = FLAT_TOOL | {"strict": None}
    given = user(world.QUESTION)
    first = scripted.responses.create(model=world.SCRIPTED_MODEL, input=given, tools=[tool])
    [call] = [item for item in first.output if item.type == "function_call"]
    given += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "Snow."}]
    second = scripted.responses.create(model=world.SCRIPTED_MODEL, input=given, tools=[tool])
    assert second.output_text == world.SNOWS


def test_errors():
    """Each status becomes the client's own exception."""
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(**ASK, messages=user("Hi"))
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="none", messages=user("Hi"))
    with pytest.raises(openai.BadRequestError, match=world.TOO_LONG_WORDS) as caught:
        client.chat.completions.create(**ASK, messages=user(world.TOO_LONG))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="none", input="Hi")


def test_abort():
    """Closing the stream ends the request."""
    stream = client.chat.completions.create(**{**ASK, "max_tokens": 2000}, messages=user(world.LONG), stream=True)
    next(chunk for chunk in stream if chunk.choices[0].delta.content)
    stream.close()
    world.assert_becomes_idle()
