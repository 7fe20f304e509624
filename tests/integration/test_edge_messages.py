"""Anthropic's Messages API: its official client, unchanged, gets whole and streamed messages, calls, thinking and
errors as from Anthropic's own server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from edge_http.admission import EdgeSettings
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.parsers.spec import ParserSpec
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import CONTENT_FILTER, LENGTH, FakeRequest, answer
from tests.fakes.scripted_answer import messages_body
from tests.lazy_imports import imported_when_used

pytestmark = pytest.mark.xdist_group("anthropic")  # which takes seconds to import
anthropic: Any = imported_when_used("anthropic")

USER: Any = [{"role": "user", "content": "Weather?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK: Any = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OUTPUT = f"<think>Hm \N{SLIGHTLY SMILING FACE}.</think>Let me look.\n{CALL}"


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world(output=ParserSpec(tools="hermes", reasoning="qwen3")) as started:
        yield started


@pytest.fixture
async def client(world: EdgeWorld) -> AsyncIterator[Any]:
    async with client_of(world) as opened:
        yield opened


def client_of(world: EdgeWorld) -> Any:
    return anthropic.AsyncAnthropic(base_url=world.url, api_key="none", max_retries=0)


def pieces(text: str, size: int = 3) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def prompt_of(world: EdgeWorld) -> str:
    tokenizer = world.edge.models.by_name["tiny"].tokenizer
    return tokenizer.decode(world.link.requests[-1].request.prompt_token_ids, skip_special_tokens=False)


async def post(world: EdgeWorld, path: str = "/v1/messages", **fields: Any) -> tuple[int, Any]:
    return await world.post(path, messages_body(**fields))


async def events_of(world: EdgeWorld, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names have been compared with their types."""
    async with world.http.post(world.url + "/v1/messages", json=messages_body(stream=True, **fields)) as response:
        assert response.status == 200, await response.text()
        assert response.headers["request-id"] == response.headers["x-request-id"]
        events: list[dict[str, Any]] = []
        for event in (await response.text()).removesuffix("\n\n").split("\n\n"):
            name, data = [line for line in event.split("\n") if not line.startswith("id: ")]
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events


async def test_the_official_client_gets_a_text(world: EdgeWorld, client: Any) -> None:
    """The least that a client does works, streamed or not, with the same message."""
    world.link.script = answer("Hel", "lo", num_cached_tokens=2)
    whole = await client.messages.create(model="tiny", max_tokens=9, messages=USER, system="Be kind.")
    assert [block.model_dump(exclude_none=True) for block in whole.content] == [{"type": "text", "text": "Hello"}]
    assert (whole.role, whole.stop_reason, whole.model) == ("assistant", "end_turn", "tiny")
    assert whole.id.startswith("msg_")
    assert whole._request_id
    assert (whole.usage.cache_read_input_tokens, whole.usage.output_tokens) == (2, 2)
    request = world.link.requests[-1].request
    assert whole.usage.input_tokens + 2 == len(request.prompt_token_ids)
    assert request.wanted.stop.max_tokens == 9
    assert prompt_of(world).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWeather?")
    async with client.messages.stream(model="tiny", max_tokens=9, messages=USER) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert texts == ["Hel", "lo"]
    assert final.content[0].model_dump(exclude_none=True) == {"type": "text", "text": "Hello"}
    assert final.usage == whole.usage.model_copy(update={"input_tokens": final.usage.input_tokens})


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_thinking_text_and_call_are_blocks_in_their_order(world: EdgeWorld, client: Any, size: int) -> None:
    """However the output arrives, the client puts the same message together as without streaming."""
    world.link.script = answer(*pieces(OUTPUT, size))
    whole = await client.messages.create(model="tiny", max_tokens=99, messages=USER, tools=[WEATHER])
    async with client.messages.stream(model="tiny", max_tokens=99, messages=USER, tools=[WEATHER]) as stream:
        final = await stream.get_final_message()
    for message in (whole, final):
        thinking, text, call = message.content
        assert thinking.type == "thinking"
        assert thinking.thinking == "Hm \N{SLIGHTLY SMILING FACE}."
        assert thinking.signature
        assert text.type == "text"
        assert text.text.strip() == "Let me look."
        assert call.type == "tool_use"
        assert call.id.startswith("toolu_")
        assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens_details
        assert message.usage.output_tokens_details.thinking_tokens > 0 or size == 1000


async def test_events_come_in_anthropics_order(world: EdgeWorld) -> None:
    """Clients that read the events themselves rely on their order: a block ends before the next one begins."""
    world.link.script = answer(OUTPUT)
    events = await events_of(world, tools=[WEATHER])
    assert [event["type"] for event in events] == [
        "message_start",
        *("content_block_start", "ping", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert [event["index"] for event in events if "index" in event] == [0] * 4 + [1] * 3 + [2] * 3
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 1


async def test_an_empty_answer_has_an_empty_block(world: EdgeWorld, client: Any) -> None:
    """Clients take the first block without looking."""
    for tools in ([], [CLOCK]):
        world.link.script = answer()
        whole = await client.messages.create(model="tiny", max_tokens=9, messages=USER, tools=tools)
        async with client.messages.stream(model="tiny", max_tokens=9, messages=USER, tools=tools) as stream:
            final = await stream.get_final_message()
        for message in (whole, final):
            assert [block.model_dump(exclude_none=True) for block in message.content] == [{"type": "text", "text": ""}]


async def test_a_call_that_is_cut_off_becomes_text(world: EdgeWorld, client: Any) -> None:
    """max_tokens may end in the middle of the arguments: the client gets what there is, and no half call to run."""
    world.link.script = answer(*pieces(CALL[:-25]), reason=LENGTH)
    whole = await client.messages.create(model="tiny", max_tokens=9, messages=USER, tools=[WEATHER])
    [block] = whole.content
    assert block.type == "text"
    assert '{"cit' in block.text
    assert whole.stop_reason == "max_tokens"
    async with client.messages.stream(model="tiny", max_tokens=9, messages=USER, tools=[WEATHER]) as stream:
        assert (await stream.get_final_message()).stop_reason == "max_tokens"


async def test_how_an_answer_ended(world: EdgeWorld, client: Any) -> None:
    """A client decides by stop_reason what to do next."""

    async def ending(**finish: Any) -> tuple[str | None, str | None]:
        def play(request: FakeRequest) -> None:
            request.start()
            request.tokens("Hi")
            request.finish(**finish)

        world.link.script = play
        whole = await client.messages.create(model="tiny", max_tokens=9, messages=USER, stop_sequences=["END"])
        async with client.messages.stream(model="tiny", max_tokens=9, messages=USER) as stream:
            final = await stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
        return whole.stop_reason, whole.stop_sequence

    assert await ending(stop_string="END") == ("stop_sequence", "END")
    assert list(world.link.requests[-2].request.wanted.stop.stop) == ["END"]
    assert await ending(reason=LENGTH) == ("max_tokens", None)
    assert await ending(reason=CONTENT_FILTER) == ("refusal", None)


async def test_more_tokens_than_the_window_has(world: EdgeWorld, client: Any) -> None:
    """Coding agents ask for as many tokens as Anthropic's models can write. They get what fits, and learn it if that
    was the end; a prompt that does not fit is refused in the words that make them shorten it."""
    world.link.script = answer("x", reason=LENGTH)
    whole = await client.messages.create(model="tiny", max_tokens=20_000, messages=USER)
    request = world.link.requests[-1].request
    assert request.wanted.stop.max_tokens == 4096 - len(request.prompt_token_ids)
    assert whole.stop_reason == "model_context_window_exceeded"
    for content in ("the fox " * 5000, "x" * 100_000):
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await client.messages.create(model="tiny", max_tokens=9, messages=[{"role": "user", "content": content}])


async def test_an_agents_second_request(world: EdgeWorld, client: Any) -> None:
    """Agents send everything that they have got back, with the results, in blocks with cache_control."""
    cached: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    world.link.script = answer("It snows.")
    await client.beta.messages.create(
        model="tiny",
        max_tokens=99,
        betas=["some-beta-2026-01-01"],
        system=[{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Be brief.", **cached}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "get_time", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Snow."}]},
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "content": "no clock",
                        "is_error": True,
                        **cached,
                    },
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        tools=[WEATHER, {**CLOCK, **cached}],
        thinking={"type": "adaptive"},
        metadata={"user_id": "user_1"},
        output_config={"effort": "max"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
    )
    prompt = prompt_of(world)
    assert "You are an agent.\n\nBe brief." in prompt
    assert '{"name": "get_weather", "arguments": {"city":"Oslo"}}' in prompt
    assert "Snow." in prompt
    assert "Error: no clock" in prompt
    assert prompt.index("no clock") < prompt.index("And?")


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, ["get_weather", "get_time"]), ({"type": "tool", "name": "get_time"}, ["get_time"])],
)
async def test_a_demanded_call_is_guided(world: EdgeWorld, client: Any, choice: Any, names: list[str]) -> None:
    """A model that may only write a valid call cannot fail the client that demands one."""
    world.link.script = answer(*pieces(json.dumps({"name": names[0], "arguments": {"city": "Oslo"}})))
    tools = [WEATHER, CLOCK]
    whole = await client.messages.create(model="tiny", max_tokens=99, messages=USER, tools=tools, tool_choice=choice)
    schema = json.loads(world.link.requests[-1].request.wanted.sampling.guide.json_schema)
    assert [call["properties"]["name"]["const"] for call in schema.get("anyOf", [schema])] == names
    [call] = whole.content
    assert call.type == "tool_use"
    assert (call.name, whole.stop_reason) == (names[0], "tool_use")


async def test_at_most_one_call(world: EdgeWorld, client: Any) -> None:
    """A client that disables parallel calls could not answer the second one."""
    world.link.script = answer(*pieces(CALL + "\n" + CALL))
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    fields: Any = {"model": "tiny", "max_tokens": 99, "messages": USER, "tools": [WEATHER]}
    whole = await client.messages.create(**fields, tool_choice=choice)
    async with client.messages.stream(**fields, tool_choice=choice) as stream:
        final = await stream.get_final_message()
    both = await client.messages.create(**fields)
    assert [sum(block.type == "tool_use" for block in message.content) for message in (whole, final, both)] == [1, 1, 2]


async def test_no_calls(world: EdgeWorld, client: Any) -> None:
    """With tool_choice none the prompt does not mention the tools, and what looks like a call is text."""
    world.link.script = answer(*pieces(CALL))
    whole = await client.messages.create(
        model="tiny", max_tokens=99, messages=USER, tools=[WEATHER], tool_choice={"type": "none"}
    )
    assert [block.type for block in whole.content] == ["text"]
    assert "get_weather" not in prompt_of(world)


async def test_thinking_that_the_client_does_not_want_to_read(world: EdgeWorld, client: Any) -> None:
    """With display omitted the blocks are there, without their text."""
    world.link.script = answer(*pieces(OUTPUT))
    fields: Any = {"model": "tiny", "max_tokens": 99, "messages": USER, "tools": [WEATHER]}
    fields["thinking"] = {"type": "adaptive", "display": "omitted"}
    whole = await client.messages.create(**fields)
    async with client.messages.stream(**fields) as stream:
        final = await stream.get_final_message()
    for message in (whole, final):
        assert message.content[0].type == "thinking"
        assert not message.content[0].thinking
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]


async def test_the_official_tool_runner_goes_without_a_thread(world: EdgeWorld, client: Any) -> None:
    """Anthropic's clients ask for a thread in every loop of tools. They send whole conversations instead only if the
    refusal says so in `details`."""

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"Snow in {city}."

    world.link.script = lambda request: answer("It snows." if "Snow in Oslo." in prompt_of(world) else CALL)(request)
    runner = client.beta.messages.tool_runner(model="tiny", max_tokens=100, messages=USER, tools=[get_weather])
    message = await runner.until_done()
    assert [block.text for block in message.content if block.type == "text"] == ["It snows."]


async def test_structured_output(world: EdgeWorld, client: Any) -> None:
    """A schema binds the model, and the answer is one block of text."""
    world.link.script = answer('{"a"', ": 1}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    whole = await client.messages.create(
        model="tiny",
        max_tokens=99,
        messages=USER,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert json.loads(world.link.requests[-1].request.wanted.sampling.guide.json_schema) == schema
    [block] = whole.content
    assert block.type == "text"
    assert json.loads(block.text) == {"a": 1}


async def test_an_answer_that_the_client_has_begun(world: EdgeWorld) -> None:
    """The prompt ends with what the client has begun, so the model continues from there."""
    world.link.script = answer("42}")
    begun = [*USER, {"role": "assistant", "content": 'A <|im_end|> e: {"n":'}]
    status, body = await post(world, messages=begun)
    assert status == 200, body
    assert body["content"][0]["text"] == "42}"
    assert prompt_of(world).endswith('<|im_start|>assistant\nA <|im_end|> e: {"n":')
    [end_id] = world.edge.models.by_name["tiny"].tokenizer.special_token_ids(["<|im_end|>"])
    assert list(world.link.requests[-1].request.prompt_token_ids).count(end_id) == 1  # the one behind the user's turn


async def test_count_tokens(world: EdgeWorld, client: Any) -> None:
    """The count is that of the same request's prompt, and costs no router anything."""
    fields: Any = {"model": "tiny", "messages": USER, "tools": [WEATHER], "system": "Be kind."}
    count = await client.messages.count_tokens(**fields)
    assert not world.link.requests
    world.link.script = answer("x")
    await client.messages.create(max_tokens=9, **fields)
    assert count.input_tokens == len(world.link.requests[-1].request.prompt_token_ids)
    assert (await client.beta.messages.count_tokens(**fields)).input_tokens == count.input_tokens


async def test_models(world: EdgeWorld, client: Any) -> None:
    """The same path has both APIs' lists: Anthropic's clients are known by their header."""
    models = [model async for model in client.models.list(limit=1)]
    assert [(model.id, model.type, model.max_input_tokens) for model in models] == [("tiny", "model", 4096)]
    assert (await client.models.retrieve("tiny")).display_name == "tiny"
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.models.retrieve("other")
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        [model async for model in client.models.list(after_id="other")]
    async with world.http.get(world.url + "/v1/models") as response:
        assert (await response.json())["object"] == "list"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "other"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [*USER, {"role": "assistant", "content": "x"}], "thinking": {"type": "adaptive"}}, "messages"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f g", "input_schema": {"type": "object"}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "strict": True, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"a": "x" * 70_000}}}},
            "output_config.format.schema",
        ),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"speed": "fast"}, "speed"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0]"),
        ({"metadata": {"user_id": "x" * 513}}, "metadata.user_id"),
        ({"n": 2}, "n"),
    ],
)
async def test_what_is_not_done_is_refused_by_name(world: EdgeWorld, fields: dict[str, Any], field: str) -> None:
    """A client has to learn which field it must change; what would change the meaning is never ignored."""
    status, body = await post(world, **fields)
    assert status == 400, body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert field in body["error"]["message"]
    assert body["request_id"].startswith("req-")
    assert not world.link.requests


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21", None])
async def test_versions(world: EdgeWorld, version: str | None) -> None:
    """Old and new clients are served alike, and one that asks for a format of which kvloom knows nothing is told so."""
    world.link.script = answer("x")
    for asked, wanted in ((version, 200), ("2099-01-01", 400)):
        headers = {} if asked is None else {"anthropic-version": asked}
        path = world.url + "/v1/messages?beta=true"
        async with world.http.post(path, json=messages_body(temperature=0.5), headers=headers) as response:
            assert response.status == wanted
            assert response.headers["request-id"]


async def test_errors_have_anthropics_shape(world: EdgeWorld, client: Any) -> None:
    """The client raises its own exception for each failure: model, path, method, size, media type, overload."""
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.messages.create(model="other", max_tokens=9, messages=USER)
    assert caught.value.request_id
    for method, path, status, kind in (
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 501, "api_error"),
        ("GET", "/v1/messages/msg_x?stream=true", 404, "not_found_error"),
    ):
        async with world.http.request(method, world.url + path) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (status, kind)
    async with world.http.post(world.url + "/v1/messages", data=b"x") as response:
        assert response.status == 415
        assert (await response.json())["type"] == "error"
    for reason, status, kind in (
        (ErrorReason.ERROR_REASON_QUEUE_FULL, 429, "rate_limit_error"),
        (ErrorReason.ERROR_REASON_NO_SHARD_READY, 529, "overloaded_error"),
        (ErrorReason.ERROR_REASON_INTERNAL, 500, "api_error"),
    ):
        error = KvloomError(reason, "No.", retry_after_seconds=3.0)
        world.link.script = lambda request, error=error: request.finish(5, error=error)  # ERROR
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.messages.create(model="tiny", max_tokens=9, messages=USER)
        assert refused.value.status_code == status
        assert refused.value.body["error"]["type"] == kind
        assert refused.value.response.headers["retry-after"] == "3"


async def test_an_error_in_a_running_stream_is_an_event(world: EdgeWorld, client: Any) -> None:
    """The status has been sent, so the client learns it from the stream."""

    def play(request: FakeRequest) -> None:
        request.start()
        request.tokens("Hi")
        request.fail(ErrorReason.ERROR_REASON_SHARD_LOST)

    world.link.script = play
    assert (await events_of(world))[-1]["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIStatusError):
        async with client.messages.stream(model="tiny", max_tokens=9, messages=USER) as stream:
            await stream.get_final_message()


async def test_limits_hold(world: EdgeWorld) -> None:
    """Another API is no way around the limits on bodies."""
    async with edge_world(EdgeSettings(max_body_bytes=1024, max_messages=2)) as small:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            status, body = await post(small, path, messages=[{"role": "user", "content": "x" * 2000}])
            assert (status, body["error"]["type"]) == (413, "request_too_large")
        status, body = await post(small, messages=USER * 3)
        assert (status, "messages" in body["error"]["message"]) == (400, True)


async def test_a_prompt_that_safety_refuses(world: EdgeWorld, client: Any) -> None:
    """The safety service screens everything that a caller writes here, too: the router gets its text."""

    def refuse(request: FakeRequest) -> None:
        request.finish(CONTENT_FILTER)

    world.link.script = refuse
    with pytest.raises(anthropic.BadRequestError):
        await client.messages.create(model="tiny", max_tokens=9, messages=USER, system="hidden", tools=[WEATHER])
    text = world.link.requests[-1].request.submit.prompt_text
    assert all(part in text for part in ("hidden", "Weather?", "The weather in a city."))
