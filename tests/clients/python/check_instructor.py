"""Instructor, over OpenAI's and Anthropic's APIs: structured output is all that it does."""

from __future__ import annotations

import anthropic
import instructor
import openai
import pytest
import world
from instructor.exceptions import InstructorRetryException

ASK = {"model": world.MODEL, "max_tokens": 200, "max_retries": 0}


def openai_client(mode, key=world.KEY):
    client = openai.OpenAI(base_url=f"{world.URL}/v1", api_key=key, max_retries=0, timeout=60)
    return instructor.from_openai(client, mode=mode)


def anthropic_client(mode):
    client = anthropic.Anthropic(base_url=world.URL, api_key=world.KEY, max_retries=0, timeout=60)
    return instructor.from_anthropic(client, mode=mode)


def user(text):
    return [{"role": "user", "content": text}]


def test_forced_tool():
    """The default mode: a named function."""
    answer = openai_client(instructor.Mode.TOOLS).create(
        **ASK, messages=user(world.QUESTION), response_model=world.Weather
    )
    assert isinstance(answer, world.Weather)


def test_forced_tool_anthropic():
    """The same with Anthropic's client."""
    answer = anthropic_client(instructor.Mode.ANTHROPIC_TOOLS).create(
        **ASK, messages=user(world.QUESTION), response_model=world.Weather
    )
    assert isinstance(answer, world.Weather)


def test_streaming():
    """Partial objects while the call's arguments arrive."""
    *_, last = openai_client(instructor.Mode.TOOLS).create_partial(
        **ASK, messages=user(world.QUESTION), response_model=world.Weather
    )
    world.Weather.model_validate(last.model_dump())


def test_structured_output():
    """A schema as the response format."""
    answer = openai_client(instructor.Mode.JSON_SCHEMA).create(
        **ASK, messages=user(world.QUESTION), response_model=world.Weather
    )
    assert isinstance(answer, world.Weather)


def test_responses():
    """A function of the Responses API."""
    request = {"model": world.MODEL, "max_output_tokens": 200, "max_retries": 0}
    answer = openai_client(instructor.Mode.RESPONSES_TOOLS).create(
        **request, messages=user(world.QUESTION), response_model=world.Weather
    )
    assert isinstance(answer, world.Weather)


def test_errors():
    """The client keeps the cause's words."""
    request = {**ASK, "response_model": world.Weather}
    with pytest.raises((openai.AuthenticationError, InstructorRetryException), match="API key"):
        openai_client(instructor.Mode.TOOLS, "wrong").create(**request, messages=user("Hi"))
    with pytest.raises((openai.NotFoundError, InstructorRetryException), match="none"):
        openai_client(instructor.Mode.TOOLS).create(**{**request, "model": "none"}, messages=user("Hi"))
    with pytest.raises((openai.BadRequestError, InstructorRetryException), match=world.TOO_LONG_WORDS):
        openai_client(instructor.Mode.TOOLS).create(**request, messages=user(world.TOO_LONG))
