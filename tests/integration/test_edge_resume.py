"""Streams that lose their connection are resumed at the position they had reached, over real sockets."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from edge_http.admission import EdgeSettings
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import TokenLogprobs
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import LENGTH, FakeRequest, answer
from tests.fakes.resume_world import CHAT, client, metric, unattended
from tests.waiting import eventually

TEXT = ["Hel", "lo", " 🙂", '"\n', "x" * 300]


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as started:
        yield started


def normalized(events: list[bytes]) -> list[Any]:
    """Removes what differs between any two requests."""
    return [
        event if event == b"[DONE]" else {**json.loads(event), "id": "", "created": 0, "kvloom": None}
        for event in events
    ]


SCENARIOS: dict[str, tuple[str, dict[str, Any], Callable[[FakeRequest], None]]] = {}


def scenario(path: str, **fields: Any) -> Callable[[Callable[[FakeRequest], None]], Callable[[FakeRequest], None]]:
    def add(script: Callable[[FakeRequest], None]) -> Callable[[FakeRequest], None]:
        body = chat_body(**fields) if path == CHAT else {"model": "tiny", **fields}
        SCENARIOS[script.__name__] = (path, {**body, "stream": True}, script)
        return script

    return add


@scenario(CHAT, stream_options={"include_usage": True})
def with_usage(request: FakeRequest) -> None:
    answer(*TEXT, reason=LENGTH)(request)


@scenario(CHAT, n=3)
def three_choices(request: FakeRequest) -> None:
    for index in (1, 0, 2):
        request.start(index)
    for delta in TEXT:
        for index in range(3):
            request.tokens(delta, index)
    for index in (2, 0, 1):
        request.finish(index=index)


@scenario(CHAT, stop=["lo"])
def held_back_text(request: FakeRequest) -> None:
    request.start()
    for delta in ("Hel", "", "", "p"):
        request.tokens(delta)
    request.finish()


@scenario(CHAT, logprobs=True)
def logprobs(request: FakeRequest) -> None:
    request.start()
    for delta in "abc":
        request.tokens(delta, logprobs=[TokenLogprobs(logprob=-0.5)])
    request.finish()


@scenario("/v1/completions", prompt=["a", "b"])
def two_prompts(request: FakeRequest) -> None:
    answer("one", "two")(request)


@scenario(CHAT)
def fails_in_the_middle(request: FakeRequest) -> None:
    request.start()
    request.tokens("Hel")
    request.fail(ErrorReason.ERROR_REASON_ENGINE_FAILED)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_drop_after_every_event(world: EdgeWorld, name: str) -> None:
    """Wherever the connection breaks, the client ends up with the events of an undisturbed stream."""
    path, body, script = SCENARIOS[name]
    world.link.script = script
    undisturbed = client(world, path)
    await undisturbed.begin(body)
    for stop_after in range(len(undisturbed.events) + 1):
        dropped = client(world, path)
        await dropped.begin(body, stop_after=stop_after)
        assert dropped.response_id
        assert len(dropped.events) == stop_after
        status = await dropped.resume(by_header=bool(stop_after % 2))
        assert status == (204 if stop_after == len(undisturbed.events) else 200)
        assert normalized(dropped.events) == normalized(undisturbed.events)


@pytest.mark.parametrize("seed", range(12))
async def test_any_sequence_of_drops_gives_the_same_events(world: EdgeWorld, seed: int) -> None:
    """Seeded: tokens, drops, returns and replays of events that the client already has, in any order."""
    rng = random.Random(seed)
    streamed = client(world)
    drop = asyncio.create_task(streamed.begin(chat_body(stream=True, n=2), stop_after=rng.randrange(4)))
    request = await world.link.next_request()
    steps = [(rng.randrange(2), f"{i} ") for i in range(40)]
    for index in range(2):
        request.start(index)
    for index, delta in steps:
        request.tokens(delta, index)
        if rng.random() < 0.3:
            await asyncio.sleep(0)
        if drop.done() and rng.random() < 0.4:
            if rng.random() < 0.2:
                streamed.events = streamed.events[: rng.randrange(len(streamed.events) + 1)]  # it lost some itself
            stop_after = len(streamed.events) + rng.randrange(6)
            drop = asyncio.create_task(streamed.resume(stop_after=stop_after, by_header=rng.random() < 0.5))
            await asyncio.sleep(0.002 * rng.random())  # sleep: the pace of tokens
    for index in range(2):
        request.finish(index=index)
    await drop
    events = await streamed.read_to_the_end()
    texts = ["", ""]
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == ["".join(delta for i, delta in steps if i == index) for index in range(2)]
    again = client(world)
    again.response_id = streamed.response_id
    assert await again.read_to_the_end() == events  # the same bytes, from the first event on
    assert not streamed.notices
    assert not request.cancelled.is_set()


async def test_first_byte_names_the_response(world: EdgeWorld) -> None:
    """A stream that breaks before its first event can be resumed too, so its id must not be in the events only."""
    world.link.script = answer("x")
    async with world.http.post(world.url + CHAT, json=chat_body(stream=True)) as response:
        assert response.headers["x-kvloom-response-id"].startswith("chatcmpl-")
        assert "x-kvloom-resume" not in response.headers  # it was not requested
        first = json.loads((await response.text()).split("\n")[0].removeprefix("data: "))
        assert first["id"] == response.headers["x-kvloom-response-id"]
    async with world.http.post(
        world.url + CHAT, json=chat_body(stream=True), headers={"x-kvloom-resume": "on"}
    ) as response:
        assert response.headers["x-kvloom-resume"] == "30"


async def test_later_reader_takes_over(world: EdgeWorld) -> None:
    """A client often returns before the server has noticed that it was gone. The connection that it left gets the
    reason for its end, so that two clients do not take the stream from each other for ever."""
    first, second = client(world), client(world)
    begin = asyncio.create_task(first.begin(chat_body(stream=True)))
    request = await world.link.next_request()
    request.start()
    await eventually(lambda: bool(first.response_id))
    second.response_id = first.response_id
    resume = asyncio.create_task(second.resume())
    await begin
    assert json.loads(first.notices[0].removeprefix(b"data: "))["error"]["code"] == "stream_taken_over"
    request.tokens("for the second")
    request.finish()
    assert await resume == 200
    assert second.done
    assert second.events[: len(first.events)] == first.events


async def test_repeated_post_with_its_key_is_the_same_request(world: EdgeWorld) -> None:
    """Before the first byte, a client knows only the key that it chose. With the key it gets its answer, not a second
    one."""
    dropped = client(world)
    dropped.headers["Idempotency-Key"] = "mine-1"
    begin = asyncio.create_task(dropped.begin(chat_body(stream=True)))
    request = await world.link.next_request()
    begin.cancel()
    await asyncio.gather(begin, return_exceptions=True)
    await unattended(world)
    assert not request.cancelled.is_set()
    again = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=2))
    await unattended(world, 0)
    request.start()
    request.tokens("Hel")
    await again
    await unattended(world)
    request.finish()
    dropped.headers["Last-Event-ID"] = "2"
    await dropped.begin(chat_body(stream=True))
    assert dropped.done
    assert len(world.link.requests) == 1
    await dropped.begin(chat_body(stream=True, seed=5))
    assert dropped.status == 409
    assert json.loads(dropped.notices[0])["error"]["param"] == "Idempotency-Key"
    stranger = client(world, key="other")
    stranger.headers["Idempotency-Key"] = "mine-1"
    world.link.script = answer("for the other")
    await stranger.begin(chat_body(stream=True))
    assert len(world.link.requests) == 2  # the same key of another caller is another request
    await eventually(lambda: world.edge.admission.num_running == 0)


async def test_drop_before_the_first_byte_without_a_key_cancels(world: EdgeWorld) -> None:
    """No client has learned the id, so no client could come back, and nothing is generated."""
    dropped = client(world)
    begin = asyncio.create_task(dropped.begin(chat_body(stream=True)))
    request = await world.link.next_request()
    begin.cancel()
    await asyncio.gather(begin, return_exceptions=True)
    async with asyncio.timeout(5):
        await request.cancelled.wait()
    await eventually(lambda: not world.edge.resume.streams)


async def test_refusal_keeps_its_status_and_is_not_kept(world: EdgeWorld) -> None:
    """A refused request has not begun: its client gets the reason, and the same request may succeed next time."""
    world.link.script = lambda request: request.fail(ErrorReason.ERROR_REASON_QUEUE_FULL)
    refused = client(world)
    refused.headers["Idempotency-Key"] = "again"
    await refused.begin(chat_body(stream=True))
    assert refused.status == 429
    world.link.script = answer("now")
    await refused.begin(chat_body(stream=True))
    assert refused.status == 200
    assert refused.done
    world.link.connected = False
    lost = client(world)
    await lost.begin(chat_body(stream=True))
    assert lost.status == 503


async def test_http_1_0_client_resumes_without_chunks(world: EdgeWorld) -> None:
    """Replayed events are chunks in HTTP/1.1 only; an old proxy must not see their frames."""
    world.link.script = answer("Hel", "lo")
    whole = client(world)
    await whole.begin(chat_body(stream=True))
    reader, writer = await asyncio.open_connection(*world.address)
    path = f"{CHAT}/{whole.response_id}?stream=true&starting_after=1"
    writer.write(f"GET {path} HTTP/1.0\r\nAuthorization: Bearer secret\r\n\r\n".encode())
    async with asyncio.timeout(5):
        received = await reader.read()
    writer.close()
    body = received.split(b"\r\n\r\n", 1)[1]
    assert body == b"".join(b"id: %d\ndata: %b\n\n" % item for item in list(enumerate(whole.events, 1))[1:])


async def test_long_replay_waits_for_its_reader() -> None:
    """A replay much larger than the buffer for slow readers arrives completely, at the reader's pace."""
    async with edge_world(EdgeSettings(max_buffered_bytes=16 * 1024)) as world:
        dropped = client(world)
        begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        await begin
        await unattended(world)
        for i in range(3000):
            request.tokens(f"{i:05d}" + "x" * 700)
        back = asyncio.create_task(dropped.resume())
        await unattended(world, 0)
        for i in range(20):
            request.tokens(f"live {i}")
            await asyncio.sleep(0)
        request.finish()
        assert await back == 200
        assert dropped.done
        assert len(dropped.events) == 1 + 3000 + 20 + 2
        assert await metric(world, "kvloom_edge_slow_clients_total") == 0


async def test_official_client_reads_a_resumable_stream(world: EdgeWorld) -> None:
    """The ids, headers and options of resuming do not disturb the openai client."""
    world.link.script = answer("Hel", "lo")
    official = openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0)
    stream = await official.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        extra_headers={"x-kvloom-resume": "on", "Idempotency-Key": "k1"},
    )
    response_id = stream.response.headers["x-kvloom-response-id"]
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "Hello"
    again = await official.get(
        f"/chat/completions/{response_id}",
        cast_to=ChatCompletionChunk,
        stream=True,
        stream_cls=openai.AsyncStream[ChatCompletionChunk],
        options={"params": {"stream": "true", "starting_after": "2"}},
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in again]) == "lo"
    await official.close()
