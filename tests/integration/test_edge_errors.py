"""Whatever fails behind the edge, its client gets the right status or an error event, and no internals leak."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import RequestMoves, TokenLogprobs
from kvloom.v1.router_service_pb2 import FleetState
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import CANCELLED, CONTENT_FILTER, ERROR, STOP, FakeRequest, FakeRouterLink, answer


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as started:
        yield started


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (ErrorReason.ERROR_REASON_NO_SHARD_READY, 503, "no_shard_ready"),
        (ErrorReason.ERROR_REASON_QUEUE_FULL, 429, "queue_full"),
        (ErrorReason.ERROR_REASON_QUEUE_TIMEOUT, 408, "queue_timeout"),
        (ErrorReason.ERROR_REASON_SHARD_LOST, 502, "shard_lost"),
        (ErrorReason.ERROR_REASON_CONTENT_FILTERED, 400, "content_filter"),
        (ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, 504, "deadline_exceeded"),
    ],
)
async def test_router_errors_keep_their_status_when_nothing_was_sent(
    world: EdgeWorld, stream: bool, reason: ErrorReason.ValueType, status: int, code: str
) -> None:
    """A stream that fails before its first token is an HTTP error instead of a 200 with an error event."""
    world.link.script = lambda request: request.fail(reason, "no", retry_after_seconds=1.5)
    async with world.http.post(f"{world.url}/v1/chat/completions", json=chat_body(stream=stream)) as response:
        body = await response.json()
        assert (response.status, body["error"]["code"], body["error"]["message"]) == (status, code, "no")
        assert response.headers["Retry-After"] == "2"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("end", "reason", "dropped"),
    [
        ("rejected", "rejected-queue-full", "rejected-queue-full"),
        ("evicted", "evicted-queue-full", "evicted-queue-full"),
        ("failed", "failed-queue-full", None),
        ("", None, None),
    ],
)
async def test_a_refusal_says_how_the_router_ended_the_request(
    world: EdgeWorld, path: str, end: str, reason: str | None, dropped: str | None
) -> None:
    """A gateway or a client tells from a header what to do, without reading the body of any API."""
    error = KvloomError(ErrorReason.ERROR_REASON_QUEUE_FULL, "Full.", end=end)
    world.link.script = lambda request: request.finish(ERROR, error=error)
    async with world.http.post(f"{world.url}{path}", json=chat_body(max_tokens=4)) as response:
        assert response.headers.get("x-kvloom-reason") == reason
        assert response.headers.get("x-llm-d-request-dropped-reason") == dropped


@pytest.mark.parametrize("headers", [{"x-kvloom-resume": "on"}, {"Idempotency-Key": "k1"}, {}])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_way_of_delivery_says_how_the_router_ended_the_request(
    world: EdgeWorld, headers: dict[str, str], stream: bool
) -> None:
    """Answers that are kept for a client that comes back take another way to it."""
    error = KvloomError(ErrorReason.ERROR_REASON_QUEUE_TIMEOUT, "Too late.", end="evicted")
    world.link.script = lambda request: request.finish(ERROR, error=error)
    body = chat_body(stream=stream)
    async with world.http.post(f"{world.url}/v1/chat/completions", json=body, headers=headers) as response:
        assert (response.status, response.headers.get("x-kvloom-reason")) == (408, "evicted-queue-timeout")


async def test_an_answer_says_that_it_had_to_move(world: EdgeWorld) -> None:
    """A pause in an answer is otherwise a riddle for its caller. The last of several choices knows most."""

    def play(request: FakeRequest) -> None:
        for index in range(2):
            request.start(index=index)
            request.tokens("Hi", index=index)
            moves = RequestMoves(num_preemptions=index + 1, num_failovers=index, continuation=1 + index)
            request.finish(STOP, index=index, moves=moves)

    world.link.script = play
    given = {"x-kvloom-details": "true"}
    for stream in (False, True):
        body = chat_body(stream=stream, n=2)
        async with world.http.post(f"{world.url}/v1/chat/completions", json=body, headers=given) as response:
            text = await response.text()
        assert response.headers.get("x-kvloom-reason") == (None if stream else "preempted, failed-over")
        assert response.headers.get("x-kvloom-failover") == (None if stream else "resampled")
        assert '"moves":{"preempted":2,"failed_over":1},"failover":"resampled"' in text


@pytest.mark.parametrize("stream", [False, True])
async def test_refused_prompt(world: EdgeWorld, stream: bool) -> None:
    """A prompt that the safety policy blocks is a 400 with the policy's message."""
    error = KvloomError(ErrorReason.ERROR_REASON_CONTENT_FILTERED, "Not that.")
    world.link.script = lambda request: request.finish(CONTENT_FILTER, error=error)
    status, body = await world.chat(stream=stream)
    assert (status, body["error"]["code"], body["error"]["message"]) == (400, "content_filter", "Not that.")


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_halted_midway(world: EdgeWorld, stream: bool) -> None:
    """The text that was sent stays valid, and the finish reason states why the answer ends."""
    world.link.script = answer("so ", "far", reason=CONTENT_FILTER)
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client:
        if stream:
            chunks = [chunk async for chunk in await client.chat.completions.create(**chat_body(stream=True))]
            assert chunks[-1].choices[0].finish_reason == "content_filter"
        else:
            completion = await client.chat.completions.create(**chat_body())
            assert completion.choices[0].message.content == "so far"
            assert completion.choices[0].finish_reason == "content_filter"


async def test_error_in_a_running_stream(world: EdgeWorld) -> None:
    """An error event ends the stream; the official client raises it."""

    def play(request: FakeRequest) -> None:
        request.start()
        request.tokens("so far")
        request.fail(ErrorReason.ERROR_REASON_SHARD_LOST, "The shard is gone.")

    world.link.script = play
    async with world.http.post(f"{world.url}/v1/chat/completions", json=chat_body(stream=True)) as response:
        events = (await response.text()).removesuffix("\n\n").split("\n\n")
    assert json.loads(events[-1].split("data: ")[1])["error"]["code"] == "shard_lost"
    assert "[DONE]" not in events[-1]
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIError, match="The shard is gone"):
            _ = [chunk async for chunk in await client.chat.completions.create(**chat_body(stream=True))]


async def test_cancelled_by_somebody_else(world: EdgeWorld) -> None:
    """An operator's Cancel ends the request with its own code."""
    world.link.script = lambda request: request.finish(CANCELLED)
    status, body = await world.chat()
    assert (status, body["error"]["code"]) == (499, "cancelled")


async def test_router_gone(world: EdgeWorld) -> None:
    """Without a router clients get 503 with advice, readiness states the reason, and the process stays alive."""
    world.link.connected = False
    world.link.fleet = FleetState()
    status, body = await world.chat()
    assert (status, body["error"]["code"]) == (503, "router_unavailable")
    async with world.http.get(f"{world.url}/ready") as response:
        assert (response.status, (await response.json())["reason"]) == (503, "the router cannot be reached")
    async with world.http.get(f"{world.url}/health") as response:
        assert response.status == 200


async def test_bug_of_ours_leaks_nothing(world: EdgeWorld) -> None:
    """A bug is a plain 500, without a stack trace or the name of a file."""

    class BrokenLink(FakeRouterLink):
        def submit(self, request: Any, sink: Any) -> int:
            raise ZeroDivisionError("secret")

    world.edge.link = BrokenLink()
    status, body = await world.chat()
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(body)


async def test_a_broken_frame_ends_one_answer_only(world: EdgeWorld) -> None:
    """A sink that cannot process a frame fails its own request and never the shared link."""

    def play(request: FakeRequest) -> None:
        request.start()
        request.tokens("a", token_ids=[1, 2], logprobs=[TokenLogprobs(logprob=-1)])

    world.link.script = play
    status, body = await world.chat(logprobs=True)
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert world.link.requests[0].cancelled.is_set()


async def test_request_id_is_echoed_or_made(world: EdgeWorld) -> None:
    """A valid id is kept for tracing, and one that could forge headers or logs is replaced."""
    world.link.script = answer("x")
    url = f"{world.url}/v1/chat/completions"
    async with world.http.post(url, json=chat_body(), headers={"x-request-id": "abc-1"}) as response:
        assert response.headers["x-request-id"] == "abc-1"
        assert int(response.headers["openai-processing-ms"]) >= 0
    for bad in ("a b", "x" * 200, "<script>"):
        async with world.http.post(url, json={}, headers={"x-request-id": bad}) as response:
            assert response.headers["x-request-id"].startswith("req-")
