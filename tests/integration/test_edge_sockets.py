"""The Responses API over WebSocket, with aiohttp's client and with OpenAI's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai.lib.responses_websocket import AsyncResponsesWebSocketSession, ResponsesWebSocketLimits

from edge_http.sockets import connection, lane
from edge_http.wire import open_sockets
from kvloom_common.config import EdgeConfig
from kvloom_common.parsers.spec import ParserSpec
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_control import SEARCH_KEY, two_organisations
from tests.fakes.fake_router_link import answer
from tests.fakes.socket_client import connected
from tests.fakes.tenants import callers_of

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL = {"type": "function", "name": "get_weather"}


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world(output=ParserSpec(tools="hermes")) as started:
        yield started


async def test_events_are_those_of_a_stream(world: EdgeWorld) -> None:
    """The two differ in how events are framed, and in nothing else."""
    world.link.script = answer("Hello", " you")
    async with world.http.post(
        f"{world.url}/v1/responses", json={"model": "tiny", "input": "the fox", "stream": True}
    ) as response:
        lines = (await response.text()).splitlines()
    streamed = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    async with connected(world) as client:
        await client.create()
        messages = await client.until("response.completed")
    assert [message["type"] for message in messages] == [event["type"] for event in streamed]
    assert [message["sequence_number"] for message in messages] == list(range(len(messages)))
    for message, event in zip(messages, streamed, strict=True):
        assert message.keys() == event.keys()
    assert messages[-1]["response"]["output"][0]["content"][0]["text"] == "Hello you"


async def test_official_client(world: EdgeWorld) -> None:
    """Its connection and its lanes work as they are, each lane with a conversation of its own."""
    world.link.script = answer("Hello")
    limits = ResponsesWebSocketLimits(
        max_lanes=4, max_events_per_lane=64, max_events=256, max_bytes_per_lane=2**20, max_bytes=2**20
    )
    async with (
        openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as official,
        official.responses.connect() as opened,
        AsyncResponsesWebSocketSession(opened, limits=limits) as session,
    ):
        lanes = [session.lane(name) for name in ("a", "b")]
        for each, name in zip(lanes, ("a", "b"), strict=True):
            await each.send({"type": "response.create", "model": "tiny", "input": f"I am {name}"})
        first = [await each.get_final_response() for each in lanes]
        assert [response.output_text for response in first] == ["Hello", "Hello"]
        await lanes[0].send(
            {"type": "response.create", "model": "tiny", "input": "the fox", "previous_response_id": first[0].id}
        )
        while (await lanes[0].recv()).type != "response.completed":
            pass
    prompt = world.edge.models.by_name["tiny"].tokenizer.decode(
        world.link.requests[-1].request.prompt_token_ids, skip_special_tokens=False
    )
    assert "I am a" in prompt
    assert "I am b" not in prompt


async def test_a_lane_is_answered_in_order_and_lanes_at_a_time(world: EdgeWorld) -> None:
    """A slow answer delays what follows it in its lane, and nothing else."""
    async with connected(world) as client:
        await client.create("one", stream_id="a")
        await client.create("two", stream_id="a")
        slow = await world.link.next_request()
        await client.create("three", stream_id="b")
        other = await world.link.next_request()
        answer("Three")(other)
        assert (await client.until("response.completed"))[-1]["stream_id"] == "b"
        answer("One")(slow)
        assert (await client.until("response.completed"))[-1]["stream_id"] == "a"
        answer("Two")(await world.link.next_request())
        assert (await client.ended())["output"][0]["content"][0]["text"] == "Two"


async def test_what_follows_an_unstored_response(world: EdgeWorld) -> None:
    """Without an orchestrator a connection knows its own responses, and those of no other connection."""
    world.link.script = answer("Hello")
    async with connected(world) as client:
        await client.create("the quick fox", generate=False)
        prepared = await client.ended()
        assert (prepared["status"], prepared["output"], world.link.requests) == ("completed", [], [])
        await client.create("brown", previous_response_id=prepared["id"])
        response = await client.ended()
        await client.create("dog", previous_response_id=response["id"])
        await client.ended()
        request = world.link.requests[-1].request
        prompt = world.edge.models.by_name["tiny"].tokenizer.decode(request.prompt_token_ids)
        assert all(word in prompt for word in ("the quick fox", "brown", "Hello", "dog"))
    async with connected(world) as client:
        await client.create("dog", previous_response_id=response["id"], stream_id="x")
        error = await client.error()
    assert (error["stream_id"], error["status"]) == ("x", 400)
    assert (error["error"]["code"], error["error"]["param"]) == ("previous_response_not_found", "previous_response_id")


async def test_no_more_is_kept_than_a_connection_may_have(world: EdgeWorld) -> None:
    """Responses that nothing follows any more do not fill the memory."""
    world.link.script = answer("Hello")
    world.edge.config.max_body_bytes = 1500
    async with connected(world) as client:
        ids: list[str] = []
        for _ in range(4):
            await client.create("x" * 1000)
            ids.append((await client.ended())["id"])
        assert world.edge.admission.collected.num_bytes <= 3000
        await client.create("y", previous_response_id=ids[-1])
        assert (await client.ended())["status"] == "completed"
        await client.create("y", previous_response_id=ids[0])
        assert (await client.error())["error"]["code"] == "previous_response_not_found"
    assert world.edge.admission.collected.num_bytes == world.edge.admission.pipelined.num_bytes == 0


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("no JSON", None),
        ("[]", None),
        ('"response.create"', None),
        ("{}", "type"),
        ('{"type": ' + "[" * 100_000 + "]" * 100_000 + "}", None),
        ('{"type": "response.create", "generate": ' + "[" * 900 + "]" * 900 + "}", "generate"),
        ('{"type": "response.create", "model": "tiny", "input": ' + "[" * 800 + "]" * 800 + "}", "input[0]"),
        ('{"type": 7}', "type"),
        ('{"type": "session.update"}', "type"),
        ('{"type": "response.create"}', "model"),
        ('{"type": "response.create", "model": "tiny", "input": 5}', "input"),
        ('{"type": "response.create", "model": "tiny", "input": "x", "background": true}', "background"),
        ('{"type": "response.create", "model": "tiny", "input": "x", "generate": "no"}', "generate"),
        ('{"type": "response.create", "model": "tiny", "input": "x", "stream_id": ""}', "stream_id"),
        ('{"type": "response.create", "model": "tiny", "input": "x", "stream_id": "a b"}', "stream_id"),
        ('{"type": "response.create", "model": "tiny", "input": "x", "stream_id": 1}', "stream_id"),
        ('{"type": "response.create", "model": "tiny", "input": "x", "temperature": 9}', "temperature"),
    ],
)
async def test_bad_messages_end_no_connection(world: EdgeWorld, message: str, param: str | None) -> None:
    """Each gets an error that says what is wrong, and the next message is served."""
    world.link.script = answer("Hello")
    async with connected(world) as client:
        await client.socket.send_str(message)
        error = await client.next()
        assert (error["type"], error["status"], error["error"]["param"]) == ("error", 400, param)
        assert error["error"]["message"]
        await client.create()
        assert (await client.ended())["status"] == "completed"


async def test_an_unknown_model_has_the_status_that_it_has_over_http(world: EdgeWorld) -> None:
    """Clients tell by it if a retry helps, and find the request by its id."""
    async with connected(world) as client:
        await client.create(model="gpt-4")
        error = await client.error()
    assert (error["status"], error["error"]["code"]) == (404, "model_not_found")
    assert "Served are: tiny." in error["error"]["message"]
    assert error["error"]["headers"]["x-request-id"]


async def test_a_client_that_goes_cancels_its_answers(world: EdgeWorld) -> None:
    """Nobody would read them; whoever wants them kept asks for the background over HTTP."""
    async with connected(world) as client:
        await client.create(stream_id="a")
        await client.create(stream_id="b")
        requests = [await world.link.next_request() for _ in range(2)]
        requests[0].start()
        requests[0].tokens("Hello")
        await client.until("response.output_text.delta")
        client.socket._response.close()
    async with asyncio.timeout(5):
        for request in requests:
            await request.cancelled.wait()
        await world.edge.admission.wait_idle()


async def test_a_resumable_answer_outlives_its_connection(world: EdgeWorld) -> None:
    """If the handshake asks for it, as a request over HTTP would. The rest is read by its name."""
    async with connected(world, headers={"x-kvloom-resume": "on"}) as client:
        await client.create()
        request = await world.link.next_request()
        request.start()
        request.tokens("Hello")
        messages = await client.until("response.output_text.delta")
        client.socket._response.close()
    request.tokens(" you")
    request.finish()
    url = f"{world.url}/v1/responses/{messages[0]['response']['id']}"
    query = {"stream": "true", "starting_after": str(messages[-1]["sequence_number"])}
    async with world.http.get(url, params=query) as response:
        text = await response.text()
    assert '"delta":" you"' in text
    assert "response.completed" in text
    assert "response.created" not in text


async def test_messages_of_a_wrong_kind_and_size(world: EdgeWorld) -> None:
    """The connection is closed with the code that says why."""
    world.edge.config.max_body_bytes = 1000
    async with connected(world) as client:
        await client.socket.send_bytes(b"{}")
        assert await client.close_code() == 1003
    async with connected(world) as client:
        await client.create("x" * 2000)
        assert await client.close_code() == 1009


async def test_limits_of_a_connection(world: EdgeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes, waiting requests and connections have bounds, and errors of their own beyond."""
    monkeypatch.setattr(connection, "MAX_LANES", 2)
    monkeypatch.setattr(connection, "MAX_WAITING", 2)
    monkeypatch.setattr(open_sockets, "MAX_PER_CALLER", 1)
    async with connected(world) as client:
        for name in ("a", "b", "c"):
            await client.create(stream_id=name)
        assert (await client.error())["error"]["code"] == "websocket_stream_limit_reached"
        for _ in range(2):
            await world.link.next_request()
        for _ in range(3):
            await client.create(stream_id="a")
        error = await client.error()
        assert (error["status"], error["error"]["code"]) == (429, "rate_limit_exceeded")
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await world.http.ws_connect(f"{world.url}/v1/responses")
        assert refused.value.status == 429


async def test_no_more_are_active_than_may_be(world: EdgeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many lanes of one connection do not take the place of others' requests."""
    monkeypatch.setattr(lane, "MAX_ACTIVE", 1)
    async with connected(world) as client:
        await client.create("one", stream_id="a")
        await client.create("two", stream_id="b")
        first = await world.link.next_request()
        await client.create("three", stream_id="a", model="gpt-4")
        answer("One")(first)
        await client.ended()
        answer("Two")(await world.link.next_request())
        assert len(world.link.requests) == 2


async def test_a_client_that_does_not_read(world: EdgeWorld) -> None:
    """Its answer is cancelled and its connection closed; no memory is filled for it."""
    world.edge.config.max_buffered_bytes = 1000
    async with connected(world) as client:
        await client.create()
        request = await world.link.next_request()
        client.socket._response.connection.transport.pause_reading()
        request.start()
        async with asyncio.timeout(10):
            while not request.cancelled.is_set():
                request.tokens("x" * 50_000)
                await asyncio.sleep(0)
        client.socket._response.close()


async def test_pages_of_other_origins(world: EdgeWorld) -> None:
    """A browser asks no leave for WebSockets, so that any page could use a server of its visitor's machine."""
    for origin, status in (("https://evil.example", 403), ("null", 403), (world.url, 101)):
        headers = {"Origin": origin}
        if status == 101:
            async with connected(world, headers=headers):
                continue
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await world.http.ws_connect(f"{world.url}/v1/responses", headers=headers)
        assert refused.value.status == status
    async with (
        edge_world(EdgeConfig(cors_origins=["https://chat.example"])) as listed,
        connected(listed, headers={"Origin": "https://chat.example"}),
    ):
        pass


async def test_requests_that_open_none(world: EdgeWorld) -> None:
    """They get errors of HTTP."""
    async with world.http.get(f"{world.url}/v1/responses") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST, GET")
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    async with world.http.get(f"{world.url}/v1/responses", headers=headers) as response:
        assert response.status == 400
        assert "handshake" in (await response.json())["error"]["message"]


async def test_an_edge_that_stops_closes_connections(world: EdgeWorld) -> None:
    """After their answers; the code lets clients connect again, to another edge."""
    async with connected(world) as client:
        await client.create()
        request = await world.link.next_request()
        draining = asyncio.create_task(world.server.drain())
        await asyncio.sleep(0)
        await client.create(stream_id="late")
        assert (await client.error())["error"]["code"] == "draining"
        answer("Hello")(request)
        assert (await client.ended())["status"] == "completed"
        assert await client.close_code() == 1012
        await draining


async def test_a_connection_does_not_last_for_ever(world: EdgeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client is told why it is closed."""
    monkeypatch.setattr(connection, "MAX_SECONDS", 0.01)
    async with connected(world) as client:
        assert (await client.error())["error"]["code"] == "websocket_connection_limit_reached"
        assert await client.close_code() == 1012


async def test_a_client_that_is_gone_is_noticed(world: EdgeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that vanishes says nothing, and its connection would stay for an hour."""
    monkeypatch.setattr(connection, "PING_SECONDS", 0.05)
    async with connected(world, autoping=False) as client:
        assert await client.close_code() == 1006


async def test_keys_are_checked_for_each_message(tmp_path: Path) -> None:
    """A key that is revoked meanwhile serves no further message, and ends the connection."""
    callers = callers_of(tmp_path, two_organisations())
    async with edge_world(callers=callers) as world:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await world.http.ws_connect(f"{world.url}/v1/responses")
        assert refused.value.status == 401
        world.link.script = answer("Hello")
        async with connected(world, headers={"Authorization": f"Bearer {SEARCH_KEY}"}) as client:
            await client.create()
            assert (await client.ended())["status"] == "completed"
            assert world.link.requests[-1].request.submit.tenant == "acme/search"


# -- steering ---------------------------------------------------------------------------------------------------------


async def test_steering_ends_a_response_and_begins_the_next(world: EdgeWorld) -> None:
    """The client sees at once what it has asked for; what was generated so far stays part of the conversation."""
    async with connected(world) as client:
        await client.create("How warm is it?", stream_id="a", instructions="Be brief.")
        request = await world.link.next_request()
        request.start()
        request.tokens("It is 80 °F")
        created = (await client.until("response.output_text.delta"))[0]["response"]
        await client.steer(created["id"])
        accepted = (await client.until("response.steer.accepted"))[-1]
        assert (accepted["stream_id"], accepted["steer"]["previous_response_id"]) == ("a", created["id"])
        ended = await client.ended()
        assert (ended["status"], ended["incomplete_details"]) == ("incomplete", {"reason": "steered"})
        assert (ended["output"][0]["status"], ended["usage"]["output_tokens"]) == ("incomplete", 1)
        assert request.cancelled.is_set()
        following = await world.link.next_request()
        prompt = world.edge.models.by_name["tiny"].tokenizer.decode(following.request.prompt_token_ids)
        assert all(text in prompt for text in ("Be brief.", "How warm is it?", "It is 80 °F", "Use metric units."))
        answer("27 °C")(following)
        messages = await client.until("response.completed")
        assert messages[0]["type"] == "response.created"
        assert messages[-1]["stream_id"] == "a"
        assert messages[-1]["response"]["id"] != created["id"]


async def test_steering_waits_for_what_a_client_owes(world: EdgeWorld) -> None:
    """A call is not cut. Its result comes first, and the added message with it."""
    async with connected(world) as client:
        await client.create("How warm is it?", tools=[TOOL])
        request = await world.link.next_request()
        request.start()
        begun = CALL.index("Oslo")
        request.tokens(CALL[:begun])
        created = (await client.until("response.output_item.added"))[0]["response"]
        await client.steer(created["id"])
        await client.until("response.steer.accepted")
        request.tokens(CALL[begun:])
        request.finish()
        ended = await client.ended()
        assert ended["status"] == "completed"
        told = await client.next()
        assert (told["type"], told["reason"]) == ("response.steer.pending", "waiting_for_required_input")
        [required] = told["required_input"]
        assert required["call_id"] == ended["output"][0]["call_id"]
        await client.socket.send_json(
            {
                "type": "response.create",
                "model": "tiny",
                "previous_response_id": ended["id"],
                "input": [{**required, "output": "27 °C"}],
            }
        )
        following = await world.link.next_request()
        prompt = world.edge.models.by_name["tiny"].tokenizer.decode(following.request.prompt_token_ids)
        assert "Use metric units." in prompt
        assert "27 °C" in prompt


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ("", {}),
        ([], {}),
        (7, {}),
        ([{"role": "system", "content": "x"}], {}),
        ([{"role": "user", "content": "x", "name": "Ann"}], {}),
        ([{"type": "function_call_output", "call_id": "c", "output": "x"}], {}),
        ("x", {"stream_id": "a"}),
    ],
)
async def test_steers_that_are_wrong(world: EdgeWorld, given: Any, more: dict[str, Any]) -> None:
    """They come back with a code, and the response goes on."""
    async with connected(world) as client:
        await client.create()
        request = await world.link.next_request()
        request.start()
        request.tokens("Hello")
        created = (await client.until("response.output_text.delta"))[0]["response"]
        await client.steer(created["id"], given, **more)
        failed = (await client.until("response.steer.failed"))[-1]
        assert (failed["error"]["code"], failed["steer"]["input"]) == ("invalid_input", given)
        request.finish()
        assert (await client.ended())["status"] == "completed"


async def test_steers_of_responses_that_do_not_run(world: EdgeWorld) -> None:
    """Their codes say if the client should begin a response of its own."""
    world.link.script = answer("Hello")
    async with connected(world) as client:
        await client.create()
        response = await client.ended()
        for name, code in ((response["id"], "response_already_completed"), ("resp_0", "response_not_found")):
            await client.steer(name)
            failed = (await client.until("response.steer.failed"))[-1]
            assert (failed["error"]["code"], failed["steer"]["input"]) == (code, "Use metric units.")
