"""How a client learns about the placement of its answer, and how it may influence the placement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import FabricConfig, KvloomConfig
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import CONTENT_FILTER, FakeRequest, answer

EXPLAIN = {"x-kvloom-explain": "1"}
EXPLANATION = ("x-kvloom-shard", "x-kvloom-cached-tokens")


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as started:
        yield started


async def headers_of(world: EdgeWorld, path: str, body: dict[str, Any], **more: Any) -> list[str | None]:
    """Returns the two headers of the explanation, once the answer has been read to its end."""
    async with world.http.post(world.url + path, json=body, **more) as response:
        await response.read()
        return [response.headers.get(name) for name in EXPLANATION]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", chat_body()), ("/v1/completions", {"model": "tiny", "prompt": "the"})]
)
async def test_headers_name_shard_and_cached_tokens_when_asked_for(world: EdgeWorld, path: str, body, stream) -> None:
    """One request header asks for the explanation, on all four kinds of answer; other clients get no internals."""
    world.link.script = answer("x", shard_id="shard-7", num_cached_tokens=32)
    asked = {**body, "stream": stream}
    assert await headers_of(world, path, asked, headers=EXPLAIN) == ["shard-7", "32"]
    assert await headers_of(world, path, asked) == [None, None]
    assert await headers_of(world, path, asked, headers={"x-kvloom-explain": "0"}) == [None, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_with_several_choices_the_first_to_start_is_named(world: EdgeWorld, stream: bool) -> None:
    """Choices may run on different shards after a failover, but there is only one set of headers."""

    def play(request: FakeRequest) -> None:
        request.start(1, shard_id="shard-1", num_cached_tokens=16)
        request.start(0, shard_id="shard-0")
        for index in (0, 1):
            request.tokens("x", index)
            request.finish(index=index)

    world.link.script = play
    body = chat_body(n=2, stream=stream)
    assert await headers_of(world, "/v1/chat/completions", body, headers=EXPLAIN) == ["shard-1", "16"]


async def test_a_streams_headers_wait_for_the_start_and_no_longer(world: EdgeWorld) -> None:
    """The shard is known once the answer has started, so the client gets the headers before any text."""
    body = chat_body(stream=True)
    asked = asyncio.create_task(world.http.post(f"{world.url}/v1/chat/completions", json=body, headers=EXPLAIN))
    request = await world.link.next_request()
    await asyncio.wait([asked], timeout=0.05)
    assert not asked.done()
    request.start(shard_id="shard-3", num_cached_tokens=48)
    async with asyncio.timeout(5), await asked as response:
        assert [response.headers.get(name) for name in EXPLANATION] == ["shard-3", "48"]
        request.tokens("x")
        request.finish()
        assert (await response.text()).endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_never_started_has_no_shard_to_name(world: EdgeWorld, stream: bool) -> None:
    """Errors and rejections keep their status, and waiting for a shard takes no longer than the request."""
    path = "/v1/chat/completions"
    world.link.script = lambda request: request.fail(ErrorReason.ERROR_REASON_QUEUE_FULL)
    async with world.http.post(world.url + path, json=chat_body(stream=stream), headers=EXPLAIN) as response:
        assert response.status == 429
        assert not any(name in response.headers for name in EXPLANATION)
    world.link.script = lambda request: request.finish(CONTENT_FILTER)
    async with world.http.post(world.url + path, json=chat_body(stream=stream), headers=EXPLAIN) as response:
        assert response.status == 400


async def test_the_wait_for_a_shard_ends_with_the_request_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that never starts the request must not keep the client waiting for ever."""
    monkeypatch.setattr("edge_http.submission.ROUTER_GRACE_SECONDS", 0.0)
    async with edge_world(KvloomConfig(fabric=FabricConfig(request_timeout_seconds=0.05))) as world:
        path = f"{world.url}/v1/chat/completions"
        async with world.http.post(path, json=chat_body(stream=True), headers=EXPLAIN) as response:
            assert response.status == 504


async def test_a_strange_shard_name_cannot_break_the_headers(world: EdgeWorld) -> None:
    """Shards choose their names, and a line break in a name must not become another header."""
    world.link.script = answer("x", shard_id="a\r\nx-evil: 1")
    for stream in (False, True):
        body = chat_body(stream=stream)
        shard_id, _ = await headers_of(world, "/v1/chat/completions", body, headers=EXPLAIN)
        assert shard_id == "a%0D%0Ax-evil:%201"


@pytest.mark.parametrize(
    ("fields", "headers", "key"),
    [
        ({}, {}, ""),
        ({"prompt_cache_key": "chat-17 ü"}, {}, "chat-17 ü"),
        ({}, {"x-session-id": "chat-18"}, "chat-18"),
        ({"prompt_cache_key": "chat-17"}, {"x-session-id": "chat-18"}, "chat-17"),
        ({"prompt_cache_key": None}, {"x-session-id": "x" * 256}, "x" * 256),
    ],
)
async def test_a_session_key_goes_along(world: EdgeWorld, fields, headers, key: str) -> None:
    """OpenAI clients identify a conversation with prompt_cache_key and proxies with a header, and the router may use
    it."""
    world.link.script = answer("x")
    status, _ = await world.post("/v1/chat/completions", chat_body(**fields), headers=headers)
    assert status == 200
    status, _ = await world.post("/v1/completions", {"model": "tiny", "prompt": "the", **fields}, headers=headers)
    assert status == 200
    assert [fake.request.wanted.session_key for fake in world.link.requests] == [key, key]


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"prompt_cache_key": "x" * 257}, {}, "prompt_cache_key"),
        ({"prompt_cache_key": "a\nb"}, {}, "prompt_cache_key"),
        ({"prompt_cache_key": 17}, {}, "prompt_cache_key"),
        ({}, {"x-session-id": "x" * 257}, "x-session-id"),
        ({}, {"x-session-id": "a\tb"}, "x-session-id"),
    ],
)
async def test_an_unusable_session_key_is_refused_by_name(world: EdgeWorld, fields, headers, param: str) -> None:
    """The router keeps and compares the key, so the edge bounds its size."""
    status, body = await world.post("/v1/chat/completions", chat_body(**fields), headers=headers)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, None)
    assert not world.link.requests
