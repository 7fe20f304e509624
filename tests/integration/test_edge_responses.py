"""The Responses API over a socket, with OpenAI's client and with the bytes themselves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import TokenLogprobs
from kvloom_common.parsers.spec import ParserSpec
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import CONTENT_FILTER, ERROR, LENGTH, FakeRequest, answer

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
    model = world.edge.models.by_name["tiny"]
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
    assert world.link.requests[0].request.wanted.stop.max_tokens == 7


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


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_reasoning_text_and_calls_are_items_in_order(world: EdgeWorld, size: int) -> None:
    """An agent gets each part of the output as an item of its own, streamed or not, and no message of white space."""
    world.link.script = answer(*pieces(ALL, size))
    events = await streamed(world, tools=[WEATHER])
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": 'Hm, "Oslo".'}]
    assert message["content"][0]["text"].strip() == "Let me look."
    assert [json.loads(call["arguments"]) for call in (first, second)] == [{"city": "Oslo"}, {"city": "Bergen é"}]
    assert (first["name"], first["status"], first["id"][:3]) == ("get_weather", "completed", "fc_")
    assert first["call_id"] != second["call_id"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0 or size == 1000
    assert kinds(events)[2:-1] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done") * 2,
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    for event in events:
        if "output_index" in event and "item_id" in event:
            assert event["item_id"] == response["output"][event["output_index"]]["id"]
    status, whole = await world.post(PATH, body(tools=[WEATHER]))
    assert status == 200
    assert same_but_names(whole) == same_but_names(response)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "finish", "reason", "statuses"),
    [
        ("Hello", LENGTH, "max_output_tokens", ["incomplete"]),
        ("Hello", CONTENT_FILTER, "content_filter", ["incomplete"]),
        ("<think>Hm", LENGTH, "max_output_tokens", ["incomplete"]),
        (f"Look.\n{CALL[:-25]}", LENGTH, "max_output_tokens", ["completed", "incomplete"]),
        (f"Look.\n{CALL}", LENGTH, "max_output_tokens", ["completed", "completed"]),
    ],
)
async def test_what_was_cut_off_is_incomplete(
    world: EdgeWorld, stream: bool, text: str, finish: Any, reason: str, statuses: list[str]
) -> None:
    """A client must not run a call, or show an answer, as if it were whole."""
    world.link.script = answer(*pieces(text), reason=finish)
    if stream:
        events = await streamed(world, tools=[WEATHER])
        assert events[-1]["type"] == "response.incomplete"
        response = events[-1]["response"]
    else:
        _, response = await world.post(PATH, body(tools=[WEATHER]))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert response["completed_at"] is None
    assert [item["status"] for item in response["output"]] == statuses


@pytest.mark.parametrize("text", ["", " \n"])
async def test_an_empty_answer_is_an_empty_message(world: EdgeWorld, text: str) -> None:
    """Clients take the first item; and white space is kept where it is all that the model wrote."""
    world.link.script = answer(text)
    events = await streamed(world)
    status, whole = await world.post(PATH, body())
    assert status == 200
    for response in (events[-1]["response"], whole):
        [item] = response["output"]
        assert item["content"][0]["text"] == text


async def test_a_failure_in_the_middle_ends_with_response_failed(world: EdgeWorld) -> None:
    """The client learns that the response failed, why, and what there was until then."""

    def play(request: FakeRequest) -> None:
        request.start()
        request.tokens("Hel")
        request.fail(ErrorReason.ERROR_REASON_ENGINE_FAILED)

    world.link.script = play
    events = await streamed(world)
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert (response["error"]["code"], response["error"]["type"]) == ("server_error", "engine_failed")
    assert response["output"][0]["content"][0]["text"] == "Hel"
    status, refused = await world.post(PATH, body())
    assert (status, refused["error"]["code"]) == (500, "engine_failed")


def with_logprobs(*deltas: str) -> Any:
    """A script of tokens whose logprobs are -1, -2 and so on."""

    def play(request: FakeRequest) -> None:
        request.start()
        for number, delta in enumerate(deltas, 1):
            logprobs = TokenLogprobs(logprob=-number, top_token_ids=[65], top_logprobs=[-0.5])
            request.tokens(delta, logprobs=[logprobs])
        request.finish()

    return play


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        (("Hel", "", "lo"), [-1.0, -2.0, -3.0]),
        (("", " ", "lo"), [-1.0, -2.0, -3.0]),
        (("<think>", "a", "</think>", "\n\n", "b", "c"), [-5.0, -6.0]),
        (("a", f"\n{CALL}", "", "b"), [-1.0, -4.0]),
    ],
)
async def test_logprobs_are_those_of_the_text(world: EdgeWorld, deltas: Sequence[str], expected: list[float]) -> None:
    """Reasoning and calls have none in this API; streamed ones add up to those of the whole text."""
    world.link.script = with_logprobs(*deltas)
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "tools": [WEATHER]}
    events = await streamed(world, **fields)
    in_deltas = [
        entry for event in events if event["type"].endswith("text.delta") for entry in event.get("logprobs", ())
    ]
    assert [entry["logprob"] for entry in in_deltas] == expected
    assert in_deltas[0]["top_logprobs"][0]["logprob"] == -0.5
    _, whole = await world.post(PATH, body(**fields))
    assert same_but_names(events[-1]["response"]) == same_but_names(whole)
    texts = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
    assert [entry for text in texts for entry in text["logprobs"]] == in_deltas


async def test_the_history_reaches_the_model(world: EdgeWorld, client: openai.AsyncOpenAI) -> None:
    """A stateless client sends back the items that it got, as the client's objects, with the results of the calls."""
    world.link.script = answer(*pieces(ALL))
    first = await client.responses.create(model="tiny", input="Weather?", tools=[WEATHER], store=False)
    calls = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "Snow."} for call in calls]
    world.link.script = answer("It snows.")
    second = await client.responses.create(
        model="tiny",
        input=[{"role": "user", "content": "Weather?"}, *first.output, *results],
        tools=[WEATHER],
        include=["reasoning.encrypted_content"],
    )
    assert second.output_text == "It snows."
    prompt = prompt_of(world)
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in prompt
    assert "Let me look." in prompt
    assert prompt.count("Snow.") == 2


async def test_the_official_client_streams_typed_events(world: EdgeWorld, client: openai.AsyncOpenAI) -> None:
    """OpenAI's client puts the events together, and checks them against each other."""
    world.link.script = answer(*pieces(ALL))
    async with client.responses.stream(model="tiny", input="Weather?", tools=[WEATHER]) as stream:
        seen = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert seen[0] == "response.created"
    assert "response.function_call_arguments.delta" in seen
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output_text.strip() == "Let me look."


class Place(pydantic.BaseModel):
    city: str
    days: int


async def test_the_official_client_parses_structured_output(world: EdgeWorld, client: openai.AsyncOpenAI) -> None:
    """`text.format` guides the output, and `parse` makes an object of it, streamed or not."""
    world.link.script = answer(*pieces('{"city": "Oslo", "days": 3}'))
    parsed = await client.responses.parse(model="tiny", input="Where?", text_format=Place)
    assert parsed.output_parsed == Place(city="Oslo", days=3)
    schema = json.loads(world.link.requests[0].request.wanted.sampling.guide.json_schema)
    assert set(schema["properties"]) == {"city", "days"}
    async with client.responses.stream(model="tiny", input="Where?", text_format=Place) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == Place(city="Oslo", days=3)
    _, whole = await world.post(PATH, body(text={"format": {"type": "json_object"}}))
    assert world.link.requests[-1].request.wanted.sampling.guide.json_object
    assert whole["text"]["format"] == {"type": "json_object"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["get_weather", "get_time"]),
        ({"type": "function", "name": "get_time"}, ["get_time"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
            ["get_weather"],
        ),
    ],
)
async def test_a_demanded_call_is_guided(world: EdgeWorld, choice: Any, names: list[str]) -> None:
    """A model that may only write a valid call of an allowed tool cannot fail the client that demands one."""
    world.link.script = answer(*pieces(json.dumps({"name": names[0], "arguments": {"city": "Oslo"}})))
    status, response = await world.post(PATH, body(tools=[WEATHER, CLOCK], tool_choice=choice))
    assert status == 200, response
    schema = json.loads(world.link.requests[0].request.wanted.sampling.guide.json_schema)
    assert [call["properties"]["name"]["const"] for call in schema.get("anyOf", [schema])] == names
    [call] = response["output"]
    assert (call["type"], call["name"]) == ("function_call", names[0])
    assert response["tool_choice"] == choice
    assert [tool["name"] for tool in response["tools"]] == ["get_weather", "get_time"]
    Response.model_validate(response)


async def test_a_format_does_not_stand_in_the_way_of_a_demanded_call(world: EdgeWorld) -> None:
    """Instructor sends both; the format is about messages, and the answer is the call."""
    world.link.script = answer('{"name": "get_time", "arguments": {}}')
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {}}}}
    status, response = await world.post(PATH, body(tools=[CLOCK], tool_choice="required", text=text))
    assert status == 200, response
    assert [item["type"] for item in response["output"]] == ["function_call"]


async def test_a_reference_to_an_item_is_answered_with_what_to_send(world: EdgeWorld) -> None:
    """Vercel's AI SDK refers to earlier items unless its option `store` is false; its users see only this message."""
    status, body = await world.post(
        "/v1/responses", {"model": "tiny", "input": [{"type": "item_reference", "id": "m"}]}
    )
    assert status == 400
    assert "Send store: false" in body["error"]["message"]


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"store": True}, "store", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "unsupported_parameter"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", None),
        ({"stop": ["x"]}, "stop", "unsupported_parameter"),
        ({"tools": [CLOCK], "tool_choice": {"type": "file_search"}}, "tool_choice.type", "unsupported_parameter"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input", None),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "unsupported_parameter",
        ),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role", None),
        ({"input": [MESSAGE, {"role": "user"}]}, "input[1].content", None),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", None),
        ({"input": [5]}, "input[0]", None),
        ({"input": []}, "input", None),
        ({"input": 5}, "input", None),
        ({"include": ["everything"]}, "include[0]", None),
        ({"top_logprobs": 3}, "top_logprobs", None),
        ({"top_logprobs": 30, "include": ["message.output_text.logprobs"]}, "top_logprobs", None),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
        ({"max_output_tokens": 100_000}, "max_output_tokens", "context_length_exceeded"),
        ({"input": "the fox " * 5000}, "input", "context_length_exceeded"),
        ({"temperature": 3}, "temperature", None),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", None),
        ({"text": {"format": {"type": "json_schema", "schema": [1]}}}, "text.format.schema", None),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice", None),
        (
            {
                "tools": [CLOCK],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
            },
            "tool_choice.tools[0].name",
            None,
        ),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"tools": [{"type": "function", "name": "no spaces"}]}, "tools[0].name", None),
        ({"tools": [{"type": "function"}]}, "tools[0].name", None),
        ({"model": "other"}, "model", "model_not_found"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(
    world: EdgeWorld, fields: dict[str, Any], param: str, code: str | None
) -> None:
    """A client has to learn which field is wrong, or what this server does not do."""
    world.link.script = answer("x")
    status, refused = await world.post(PATH, body(**fields))
    assert status in (400, 404), refused
    assert (refused["error"]["param"], refused["error"]["code"]) == (param, code)


async def test_harmless_values_are_accepted(world: EdgeWorld) -> None:
    """Clients send many fields at their defaults."""
    world.link.script = answer("x")
    status, response = await world.post(
        PATH,
        body(
            store=False,
            background=False,
            previous_response_id=None,
            truncation="disabled",
            reasoning={"effort": "low", "summary": "auto"},
            text={"format": {"type": "text"}, "verbosity": "medium"},
            include=["reasoning.encrypted_content"],
            service_tier="flex",
            user="u",
            safety_identifier="s",
            prompt_cache_key="k",
            parallel_tool_calls=False,
            max_tool_calls=3,
            tools=[],
            tool_choice="auto",
        ),
    )
    assert status == 200, response
    Response.model_validate(response)
    expected = {"service_tier": "flex", "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"}
    assert {name: response[name] for name in expected} == expected
    assert response["reasoning"] == {"effort": "low", "summary": "auto"}
    assert response["parallel_tool_calls"] is False
    request = world.link.requests[0].request
    assert request.wanted.session_key == "k"


async def test_a_router_that_refuses_the_prompt_names_the_input(world: EdgeWorld) -> None:
    """Routers know prompts by the fabric's names; the client gets its own."""

    def play(request: FakeRequest) -> None:
        message = "prompt_token_ids is too long."
        reason = ErrorReason.ERROR_REASON_INVALID_ARGUMENT
        request.finish(ERROR, error=KvloomError(reason, message, field="prompt_token_ids"))

    world.link.script = play
    status, refused = await world.post(PATH, body())
    assert (status, refused["error"]["param"]) == (400, "input")
    assert refused["error"]["message"] == "input is too long."


async def test_a_schema_that_is_no_text_is_refused(world: EdgeWorld) -> None:
    """Bytes that are not UTF-8 are the client's error, wherever they stand."""
    raw = json.dumps(body(text={"format": {"type": "json_schema", "schema": {"title": "X"}}})).encode()
    headers = {"content-type": "application/json"}
    async with world.http.post(world.url + PATH, data=raw.replace(b"X", b"\xff"), headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "text.format.schema"
