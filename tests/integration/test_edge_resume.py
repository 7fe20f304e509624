"""Streams that lose their connection go on where they were, over real sockets."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from kvloom.config import EdgeConfig, ResumeConfig
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import TokenLogprobs
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import LENGTH, FakeRequest, answer
from tests.fakes.resuming_client import ResumingClient

CHAT = "/v1/chat/completions"
TEXT = ["Hel", "lo", " 🙂", '"\n', "x" * 300]


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as started:
        yield started


def client(world: EdgeWorld, path: str = CHAT, key: str = "secret") -> ResumingClient:
    return ResumingClient(world.url + path, {"Authorization": f"Bearer {key}"})


def config(**resume: Any) -> EdgeConfig:
    return EdgeConfig(resume=ResumeConfig(**resume))


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until the condition holds."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  (there is no event for what a peer has noticed)
            await asyncio.sleep(0.001)


async def unattended(world: EdgeWorld, count: int = 1) -> None:
    await until(lambda: sum(not stream.is_attended for stream in world.edge.resume.streams.values()) == count)


async def metric(world: EdgeWorld, name: str) -> float:
    async with world.http.get(f"{world.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[1])


def normalized(events: list[bytes]) -> list[Any]:
    """Without what no two requests have in common."""
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
    """Wherever the connection breaks, what the client ends up with is what an undisturbed stream would have had."""
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
    """Seeded: tokens, drops, returns and replays of what is already there, in any order."""
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
            await asyncio.sleep(0.002 * rng.random())
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
    """A stream that breaks before its first event can be taken up too, so its id cannot be in the events only."""
    world.link.script = answer("x")
    async with world.http.post(world.url + CHAT, json=chat_body(stream=True)) as response:
        assert response.headers["x-kvloom-response-id"].startswith("chatcmpl-")
        assert "x-kvloom-resume" not in response.headers  # nobody asked for it
        first = json.loads((await response.text()).split("\n")[1].removeprefix("data: "))
        assert first["id"] == response.headers["x-kvloom-response-id"]
    async with world.http.post(
        world.url + CHAT, json=chat_body(stream=True), headers={"x-kvloom-resume": "on"}
    ) as response:
        assert response.headers["x-kvloom-resume"] == "30"


async def test_stream_not_begun_as_resumable_is_cancelled_at_once(world: EdgeWorld) -> None:
    """Most clients that go away never come back: their answers must cost nothing more."""
    plain = client(world)
    begin = asyncio.create_task(plain.begin(chat_body(stream=True), stop_after=1, resume="off"))
    request = await world.link.next_request()
    request.start()
    await begin
    async with asyncio.timeout(5):
        await request.cancelled.wait()
    assert await plain.resume() == 404


async def test_grace_zero_turns_resuming_off() -> None:
    """0 means: cancel at once, whatever the client asks for."""
    async with edge_world(config(grace_seconds=0)) as world:
        dropped = client(world)
        begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        await begin
        async with asyncio.timeout(5):
            await request.cancelled.wait()
        assert await dropped.resume() == 404


async def test_on_by_default_and_off_by_header() -> None:
    """An operator may turn it on for clients that cannot send the header; a client may still refuse."""
    async with edge_world(config(by_default=True)) as world:
        for resume, is_kept in (("on", True), ("off", False)):
            dropped = client(world)
            begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1, resume=resume))
            request = await world.link.next_request()
            request.start()
            await begin
            if is_kept:
                await unattended(world)
                assert not request.cancelled.is_set()
            else:
                async with asyncio.timeout(5):
                    await request.cancelled.wait()


async def test_client_that_does_not_return_is_cancelled() -> None:
    """Nobody reads it: after the grace period the engine stops, and the response is gone."""
    async with edge_world(config(grace_seconds=0.05)) as world:
        dropped = client(world)
        begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        await begin
        await unattended(world)
        request.tokens("for nobody")
        assert not request.cancelled.is_set()
        async with asyncio.timeout(5):
            await request.cancelled.wait()
        await until(lambda: world.edge.num_running == 0)
        assert await dropped.resume() == 404
        assert await metric(world, "kvloom_edge_expired_responses_total") == 1
        assert await metric(world, "kvloom_edge_unclaimed_events_total") == 1
        assert await metric(world, "kvloom_edge_resume_bytes") == 0


async def test_returning_in_time_stops_the_clock() -> None:
    """The grace period is for being away; a client that is there has all the time it needs."""
    async with edge_world(config(grace_seconds=0.1)) as world:
        dropped = client(world)
        begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        await begin
        await unattended(world)
        back = asyncio.create_task(dropped.resume())
        await unattended(world, 0)
        await asyncio.sleep(0.2)  # it is the passing of time that must not matter
        assert not request.cancelled.is_set()
        request.tokens("late")
        request.finish()
        assert await back == 200
        assert dropped.done


async def test_finished_answer_is_kept_until_it_expires() -> None:
    """The last events are as easily lost as any; but not for ever, for memory is finite."""
    async with edge_world(config(grace_seconds=0.2)) as world:
        world.link.script = answer("Hello")
        dropped = client(world)
        await dropped.begin(chat_body(stream=True), stop_after=0)
        assert await dropped.resume() == 200
        assert dropped.done
        assert await dropped.resume() == 204
        await until(lambda: not world.edge.resume.streams)
        assert await dropped.resume() == 404
        assert await metric(world, "kvloom_edge_resumed_streams_total") == 2
        assert await metric(world, "kvloom_edge_replayed_events_total") == len(dropped.events)
        assert await metric(world, 'kvloom_edge_output_tokens_total{model="tiny"}') == 1  # counted once


async def test_other_callers_find_nothing(world: EdgeWorld) -> None:
    """Another key gets the very answer that it would get for an id that never was, on every door."""
    world.link.script = answer("secret")
    owner = client(world)
    await owner.begin(chat_body(stream=True), stop_after=1)
    bodies = []
    for key, response_id in (("other", owner.response_id), ("secret", "chatcmpl-" + "0" * 24)):
        stranger = client(world, key=key)
        stranger.response_id = response_id
        assert await stranger.resume() == 404
        bodies += stranger.notices
        cancel = f"{world.url}{CHAT}/{response_id}/cancel"
        async with world.http.post(cancel, headers=stranger.headers) as response:
            bodies.append(await response.read())
    assert len(set(bodies)) == 1
    async with world.http.get(f"{world.url}{CHAT}/{owner.response_id}?stream=true") as response:
        assert response.status == 404  # without any key
    async with world.http.get(
        f"{world.url}/v1/completions/{owner.response_id}?stream=true", headers=owner.headers
    ) as response:
        assert response.status == 404  # not where this kind of answers is


async def test_evicted_events_are_said_to_be_gone() -> None:
    """The buffer is bounded: who comes too late for an event is told so, instead of getting an answer with a hole."""
    async with edge_world(config(max_response_bytes=8192)) as world:
        reader = client(world)
        begin = asyncio.create_task(reader.begin(chat_body(stream=True)))
        request = await world.link.next_request()
        request.start()
        for i in range(100):
            request.tokens(f"{i}")
        request.finish()
        await begin
        late = client(world)
        late.response_id = reader.response_id
        assert await late.resume() == 410
        assert json.loads(late.notices[0])["error"]["code"] == "events_gone"
        late.events = reader.events[:90]
        assert await late.resume() == 200
        assert late.events == reader.events


async def test_stream_that_nobody_could_take_up_whole_is_cancelled() -> None:
    """Once an event that no client has is forgotten, going on would be for nothing."""
    async with edge_world(config(max_response_bytes=8192)) as world:
        dropped = client(world)
        begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        await begin
        await unattended(world)
        for i in range(100):
            request.tokens(f"{i}")
        async with asyncio.timeout(5):
            await request.cancelled.wait()
        assert await dropped.resume() == 404


async def test_all_responses_together_are_bounded() -> None:
    """However many clients drop, memory stays within `max_bytes`: complete answers go first, the oldest first."""
    async with edge_world(config(max_bytes=64 * 1024)) as world:
        world.link.script = answer(*["x" * 1000] * 8)
        clients = []
        for _ in range(12):
            clients.append(client(world))
            await clients[-1].begin(chat_body(stream=True), stop_after=1)
            assert world.edge.resume._budget.num_bytes <= 64 * 1024
        assert await clients[0].resume() == 404
        assert await clients[-1].resume() == 200
        assert clients[-1].done
        assert await metric(world, "kvloom_edge_evicted_responses_total") > 0


async def test_unattended_answers_are_bounded() -> None:
    """Clients that ask and run away must not hold all places of the edge: the longest gone make way."""
    async with edge_world(config(max_unattended=2)) as world:
        clients, requests = [], []
        for _ in range(5):
            clients.append(client(world))
            begin = asyncio.create_task(clients[-1].begin(chat_body(stream=True), stop_after=1))
            requests.append(await world.link.next_request())
            requests[-1].start()
            await begin
            await until(lambda: all(not stream.is_attended for stream in world.edge.resume.streams.values()))
        async with asyncio.timeout(5):
            await asyncio.gather(*(request.cancelled.wait() for request in requests[:3]))
        assert not any(request.cancelled.is_set() for request in requests[3:])
        await until(lambda: world.edge.num_running == 2)
        assert await clients[0].resume() == 404
        requests[4].finish()
        assert await clients[4].resume() == 200
        assert clients[4].done


async def test_later_reader_takes_over(world: EdgeWorld) -> None:
    """A client often returns before the server has noticed that it was gone. The one that it left is told why it ends,
    so that two clients do not take the stream from each other for ever."""
    first, second = client(world), client(world)
    begin = asyncio.create_task(first.begin(chat_body(stream=True)))
    request = await world.link.next_request()
    request.start()
    await until(lambda: bool(first.response_id))
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
    """Before the first byte a client knows no id but its own. With that it gets its answer, and no second one."""
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
    await until(lambda: world.edge.num_running == 0)


async def test_drop_before_the_first_byte_without_a_key_cancels(world: EdgeWorld) -> None:
    """No client has learned the id: nobody could come back, so nothing is generated."""
    dropped = client(world)
    begin = asyncio.create_task(dropped.begin(chat_body(stream=True)))
    request = await world.link.next_request()
    begin.cancel()
    await asyncio.gather(begin, return_exceptions=True)
    async with asyncio.timeout(5):
        await request.cancelled.wait()
    await until(lambda: not world.edge.resume.streams)


async def test_refusal_keeps_its_status_and_is_not_kept(world: EdgeWorld) -> None:
    """A refused request has not begun: its client sees why, and the same request may succeed next time."""
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


async def test_cancel_ends_it_at_once(world: EdgeWorld) -> None:
    """A user who presses stop does not want to pay for the grace period."""
    dropped = client(world)
    begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
    request = await world.link.next_request()
    request.start()
    await begin
    async with world.http.post(f"{world.url}{CHAT}/{dropped.response_id}/cancel", headers=dropped.headers) as response:
        assert (response.status, await response.json()) == (200, {"id": dropped.response_id, "cancelled": True})
    assert request.cancelled.is_set() or await request.cancelled.wait()
    assert await dropped.resume() == 200
    assert json.loads(dropped.events[-1])["error"]["code"] == "cancelled"


@pytest.mark.parametrize(
    ("query", "headers", "param"),
    [
        ("", {}, "stream"),
        ("stream=true&starting_after=x", {}, "starting_after"),
        ("stream=true&starting_after=-1", {}, "starting_after"),
        ("stream=true&starting_after=99999999999999999999", {}, "starting_after"),
        ("stream=true&starting_after=99", {}, "starting_after"),
        ("stream=true", {"Last-Event-ID": "²"}, "Last-Event-ID"),
    ],
)
async def test_bad_positions_are_refused(world: EdgeWorld, query: str, headers: dict[str, str], param: str) -> None:
    """A position that cannot be is the client's error, named, and disturbs no reader."""
    world.link.script = answer("x")
    dropped = client(world)
    await dropped.begin(chat_body(stream=True), stop_after=1)
    url = f"{world.url}{CHAT}/{dropped.response_id}?{query}"
    async with world.http.get(url, headers={**dropped.headers, **headers}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_bad_headers_of_a_request_are_refused(world: EdgeWorld) -> None:
    """Each names its header; nothing is submitted."""
    for headers, param in (
        ({"x-kvloom-resume": "maybe"}, "x-kvloom-resume"),
        ({"x-kvloom-resume": "on", "Idempotency-Key": "a b"}, "Idempotency-Key"),
        ({"x-kvloom-resume": "on", "Last-Event-ID": "3"}, "Last-Event-ID"),
    ):
        status, body = await world.post(CHAT, chat_body(stream=True), headers=headers)
        assert (status, body["error"]["param"]) == (400, param)
    assert not world.link.requests


async def test_slow_reader_loses_its_connection_but_not_its_answer() -> None:
    """It is cut off as any slow reader, and can come back for the rest."""
    async with edge_world(EdgeConfig(max_buffered_bytes=64 * 1024)) as world:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, world.address)
        body = json.dumps(chat_body(stream=True)).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nx-kvloom-resume: on\r\n"
            f"Authorization: Bearer secret\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        await loop.sock_sendall(raw, head.encode() + body)
        request = await world.link.next_request()
        request.start()
        num_sent = 0
        (stream,) = world.edge.resume.streams.values()
        while stream.is_attended:
            request.tokens("x" * 1000)
            num_sent += 1
            assert num_sent < 3000, "the slow reader was never cut off"
            if num_sent % 10 == 0:
                await asyncio.sleep(0)
        received = b""
        async with asyncio.timeout(5):
            while piece := await loop.sock_recv(raw, 1 << 16):
                received += piece
        raw.close()
        last = received.split(b"\n\n")[-2]
        assert b"client_too_slow" in last
        assert b"id: " not in last.split(b"\r\n")[-1]  # its position is still that of the event before
        request.tokens("the end")
        request.finish()
        back = client(world)
        back.response_id = stream.name.id
        events = await back.read_to_the_end()
        assert len(events) == num_sent + 4  # opening, the last delta, finish, [DONE]
        assert not request.cancelled.is_set()


async def test_http_1_0_client_resumes_without_chunks(world: EdgeWorld) -> None:
    """The log holds events framed for HTTP/1.1; an old proxy must not see the frames."""
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
    """A replay much larger than the buffer for slow readers comes whole, at the reader's pace."""
    async with edge_world(EdgeConfig(max_buffered_bytes=16 * 1024)) as world:
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
    """Ids, headers and options of resuming are nothing that the openai client stumbles over."""
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


async def test_drain_waits_for_unattended_answers(world: EdgeWorld) -> None:
    """A restart must not lose an answer whose client is about to return; it can return while the edge drains."""
    dropped = client(world)
    begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
    request = await world.link.next_request()
    request.start()
    await begin
    await unattended(world)
    drain = asyncio.create_task(world.server.drain())
    await until(lambda: world.edge.draining)
    back = asyncio.create_task(dropped.resume())
    await unattended(world, 0)
    assert not drain.done()
    request.tokens("whole")
    request.finish()
    assert await back == 200
    assert dropped.done
    async with asyncio.timeout(5):
        await drain


async def test_stop_cancels_what_is_unattended() -> None:
    """An edge that stops leaves nothing running in the fabric, and no task behind."""
    async with edge_world() as world:
        dropped = client(world)
        begin = asyncio.create_task(dropped.begin(chat_body(stream=True), stop_after=1))
        request = await world.link.next_request()
        request.start()
        await begin
        await unattended(world)
        await world.server.stop()
        assert request.cancelled.is_set()
        assert world.edge.num_running == 0
