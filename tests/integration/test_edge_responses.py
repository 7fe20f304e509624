"""The Responses API over a socket, with OpenAI's client and with the bytes themselves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from kvloom.parsers.spec import ParserSpec
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import TokenLogprobs
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import CONTENT_FILTER, LENGTH, FakeRequest, answer

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CLOCK: dict[str, Any] = {"type": "function", "name": "get_time"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ALL = f'<think>Hm, "Oslo".</think>\n\nLet me look.\n{CALL}\n' + CALL.replace("Oslo", "Bergen é")


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world(output=ParserSpec(tools="hermes", reasoning="qwen3")) as started:
        yield started


@pytest.fixture
async def client(world: EdgeWorld) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as started:
        yield started


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "the fox", **fields}


def pieces(text: str, size: int = 3) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def prompt_of(world: EdgeWorld) -> str:
    model = world.edge.models["tiny"]
    return model.tokenizer.decode(world.link.requests[-1].request.prompt_token_ids, skip_special_tokens=False)


async def streamed(world: EdgeWorld, **fields: Any) -> list[dict[str, Any]]:
    """The events, whose names and numbers have been checked."""
    async with world.http.post(world.url + PATH, json=body(stream=True, **fields)) as response:
        assert response.status == 200, await response.text()
        blocks = (await response.text()).split("\n\n")
    assert blocks.pop() == ""
    events: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        # The types of OpenAI's client say which fields must be there.
        pydantic.TypeAdapter[ResponseStreamEvent](ResponseStreamEvent).validate_python(event)
        events.append(event)
    return events


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    """The types of the events, with deltas in a row as one."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if not (i and name == names[i - 1] and name.endswith("delta"))]


def same_but_names(response: dict[str, Any]) -> Any:
    """Without what differs between two requests."""
    text = json.dumps(response | {"created_at": 0, "completed_at": 0, "id": ""})
    for number, item in enumerate(response["output"]):
        text = text.replace(item["id"], f"item{number}").replace(item.get("call_id", "-" * 99), f"call{number}")
    return json.loads(text)


async def test_text_is_a_message(world: EdgeWorld) -> None:
    """The simplest request gets a whole response object."""
    world.link.script = answer("Hel", "lo", " 🙂", num_cached_tokens=2)
    status, response = await world.post(PATH, body(instructions="Be brief.", max_output_tokens=7, metadata={"a": "b"}))
    assert status == 200, response
    Response.model_validate(response)
    assert response["id"].startswith("resp_")
    assert response["status"] == "completed"
    [item] = response["output"]
    assert item["id"].startswith("msg_")
    assert item["content"] == [{"type": "output_text", "annotations": [], "logprobs": [], "text": "Hello 🙂"}]
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert response["usage"]["output_tokens"] == 3
    assert (response["instructions"], response["max_output_tokens"]) == ("Be brief.", 7)
    assert (response["metadata"], response["store"]) == ({"a": "b"}, False)
    assert "Be brief." in prompt_of(world)
    assert world.link.requests[0].request.stop.max_tokens == 7


async def test_a_stream_of_text_has_all_events_in_order(world: EdgeWorld) -> None:
    """Clients build the response from the events, and check their numbers."""
    world.link.script = answer("Hel", "", "lo")
    events = await streamed(world)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event.get("delta", "") for event in events) == "Hello"
    status, whole = await world.post(PATH, body())
    assert status == 200
    assert same_but_names(events[-1]["response"]) == same_but_names(whole)
