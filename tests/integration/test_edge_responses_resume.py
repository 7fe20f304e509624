"""Streams of the Responses API are resumed, cancelled, and continued by another edge, like all others."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from kvloom_common.parsers.spec import ParserSpec
from tests.examples import SOME_OR_ALL
from tests.fakes.edge_peers import edges
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import answer
from tests.fakes.scripted_answer import Script, begin_live, client, kill, same_but_names, undisturbed
from tests.waiting import eventually

PATH = "/v1/responses"
OUTPUT = ParserSpec(tools="hermes", reasoning="qwen3")
TOOLS = [{"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}]
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "é"}}\n</tool_call>'
TEXT = f"<think>the fox</think>\n\nthe dog 🙂\n{CALL}\n{CALL}"
BODY: dict[str, Any] = {"model": "tiny", "input": "the fox", "stream": True, "tools": TOOLS}


def body(**fields: Any) -> dict[str, Any]:
    return {**BODY, **fields}


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world(output=OUTPUT) as started:
        yield started


async def test_drop_after_every_event(world: EdgeWorld) -> None:
    """Wherever the connection breaks, the client ends up with the events of an undisturbed stream, whether it counts
    them from 0, as the API does, or by the ids of the stream."""
    expected = await undisturbed(world, PATH, BODY, Script(text=TEXT))
    world.link.script = lambda request: Script(text=TEXT).play(request, 0)
    for stop_after in range(len(expected) + 1):
        dropped = client(world, PATH)
        await dropped.begin(BODY, stop_after=stop_after)
        assert dropped.response_id.startswith("resp_")
        status = await dropped.resume(by_header=bool(stop_after % 2))
        assert status == (204 if stop_after == len(expected) else 200)
        assert same_but_names(dropped.events) == expected


@pytest.mark.parametrize("stride", SOME_OR_ALL)
@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"include": ["message.output_text.logprobs"]}], ids=["items", "text", "logprobs"]
)
async def test_killed_anywhere(redis_url: str, fields: dict[str, Any], stride: int) -> None:
    """Another edge continues inside reasoning, text and calls with the bytes that the first one would have sent. Only
    the logprobs that the first one has sent are not repeated at the end."""
    script = Script(text=TEXT, logprobs="include" in fields)
    async with edges(redis_url, output=OUTPUT) as ((first, _), _):
        expected = await undisturbed(first, PATH, body(**fields), script)

    async def one(end: int) -> None:
        async with edges(redis_url, output=OUTPUT) as ((first, peers), (second, _)):
            streamed, _, reading = await begin_live(first, PATH, body(**fields), script, end)
            await kill(first, peers, reading)
            streamed.url = second.url + PATH
            back = asyncio.create_task(streamed.resume(by_header=end % 2 == 0))
            rest = await second.link.next_request()
            script.check(rest, end)
            script.restart(rest, end)
            assert await back == 200
            events = same_but_names(streamed.events)
            if script.logprobs:
                assert list(map(without_logprobs, events)) == list(map(without_logprobs, expected))
            else:
                assert events == expected
            assert streamed.done

    ends = range(1, len(script.steps) - 1, stride)
    for begin in range(0, len(ends), 6):
        await asyncio.gather(*map(one, ends[begin : begin + 6]))


def without_logprobs(event: bytes) -> bytes:
    """Without those that are repeated at the end of a text."""
    return event if b".delta" in event else re.sub(rb'"logprobs":\[.*?\](,"text"|}$)', b"", event)


async def test_cancel(world: EdgeWorld) -> None:
    """A client that gives up ends the answer by the response's id."""
    streamed = client(world, PATH)
    reading = asyncio.create_task(streamed.begin(BODY))
    request = await world.link.next_request()
    request.start()
    request.tokens("x")
    await eventually(lambda: len(streamed.events) > 2)
    response_id = json.loads(streamed.events[0])["response"]["id"]
    assert response_id == streamed.response_id
    async with world.http.post(f"{streamed.url}/{response_id}/cancel", headers=streamed.headers) as response:
        assert response.status == 200
    await reading
    assert request.cancelled.is_set()
    assert json.loads(streamed.events[-1])["type"] == "response.failed"


async def test_a_second_connection_takes_over(world: EdgeWorld) -> None:
    """The first connection gets the API's `error` event, which is no part of the response."""
    streamed = client(world, PATH)
    reading = asyncio.create_task(streamed.begin(BODY))
    request = await world.link.next_request()
    request.start()
    request.tokens("x")
    await eventually(lambda: len(streamed.events) > 2)
    second = client(world, PATH)
    second.response_id = streamed.response_id
    resumed = asyncio.create_task(second.resume())
    await reading
    [notice] = streamed.notices
    name, data = notice.split(b"\n")
    assert name == b"event: error"
    error = json.loads(data.removeprefix(b"data: "))
    assert (error["type"], error["code"]) == ("error", "stream_taken_over")
    assert error["sequence_number"] == len(streamed.events)
    request.finish()
    assert await resumed == 200
    assert second.done


async def test_the_official_client_resumes(world: EdgeWorld) -> None:
    """`responses.retrieve` with `starting_after` continues behind the last event that the client saw."""
    world.link.script = answer(*(text for _, text in Script(text=TEXT).tokens))
    headers = {"x-kvloom-resume": "on"}
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="k", max_retries=0) as official:
        stream = await official.responses.create(**BODY, extra_headers=headers)
        seen: list[Any] = []
        async for event in stream:
            seen.append(event)
            if len(seen) == 5:
                break
        await stream.close()
        resumed = await official.responses.retrieve(
            seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
        )
        seen += [event async for event in resumed]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_response_has_one_path(world: EdgeWorld, path: str) -> None:
    """An id of one API is unknown to the others."""
    streamed = client(world, PATH)
    world.link.script = answer("x")
    await streamed.begin(BODY)
    async with world.http.get(f"{world.url}{path}/{streamed.response_id}?stream=true") as response:
        assert response.status == 404


async def test_only_streams_are_kept(world: EdgeWorld) -> None:
    """Responses are not stored: to read one again without streaming is refused with the reason."""
    async with world.http.get(f"{world.url}{PATH}/resp_1234") as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "stream"
