"""The result cache, over an edge, a router and a simulated shard (docs/how-to/result-cache.md)."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvloom.v1.generation_pb2 import RESULT_CACHE_USE_HIT, RESULT_CACHE_USE_MISS, SamplingParams, StopConditions
from kvloom.v1.router_service_pb2 import ClearResultCacheRequest, GenerateRequest, GenerateResponse
from kvloom_common.config import KvloomConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from tests.fakes.embedding_world import EmbeddingWorld, embedding_world, sim_engine
from tests.fakes.failover_world import MODEL, Collected

pytest_plugins = ("tests.fakes.router_fixtures",)

CHAT = {"messages": [{"role": "user", "content": "the quick fox"}], "temperature": 0, "max_tokens": 12}
REQUESTS = {
    "/v1/chat/completions": {**CHAT, "stream_options": {"include_usage": True}, "n": 2},
    "/v1/completions": {"prompt": "the quick fox", "max_tokens": 12, "seed": 7, "stop": ["zzz"]},
    "/v1/responses": {"input": "the quick fox", "temperature": 0, "max_output_tokens": 12, "store": False},
    "/v1/messages": CHAT,
}
_CHANGING = re.compile(rb'"(id|created|created_at|item_id|response_id|completed_at)":("[^"]*"|[0-9.]+),?')
_NUM_TOKENS = 12


def _enable(config: KvloomConfig) -> None:
    config.router.result_cache.enabled = True


@pytest.fixture
async def world(router_redis_url: str, tokenizer: ModelTokenizer) -> AsyncIterator[EmbeddingWorld]:
    async with embedding_world(router_redis_url, tokenizer, sim_engine(), configure=_enable) as started:
        yield started


async def ask(world: EmbeddingWorld, path: str, body: dict[str, Any], **headers: str) -> tuple[str | None, bytes]:
    """(x-kvloom-cache, the body without what differs between two answers)"""
    async with world.http.post(world.url + path, json={"model": MODEL, **body}, headers=headers) as response:
        raw = await response.read()
        assert response.status == 200, raw
        return response.headers.get("x-kvloom-cache"), _CHANGING.sub(b"", raw)


def events(raw: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in raw.splitlines() if line.startswith(b"data: {")]
    found = [json.loads(line.replace(b",}", b"}")) for line in lines]
    for event in found:
        event.pop("sequence_number", None)
    return found


def text_of(event: dict[str, Any]) -> tuple[int, str] | None:
    """(index of the choice, text) of an event that brings a piece of text."""
    if event.get("type") == "response.output_text.delta":
        return 0, event["delta"]
    if event.get("type") == "content_block_delta":
        return 0, event["delta"]["text"]
    choice = next(iter(event.get("choices", ())), {})
    text = choice.get("text") or choice.get("delta", {}).get("content")
    return (choice["index"], text) if text else None


def texts(raw: bytes) -> list[tuple[int, str]]:
    return [piece for event in events(raw) if (piece := text_of(event))]


def folded(raw: bytes) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """A stream without its division into pieces, which depends on how fast it was read: texts, and other events."""
    whole: dict[int, str] = {}
    for index, text in texts(raw):
        whole[index] = whole.get(index, "") + text
    return whole, [event for event in events(raw) if not text_of(event)]


def num_dispatched(world: EmbeddingWorld) -> float:
    return world.fabric.metered()["attempts"]


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cached_answer_is_the_fresh_one(world: EmbeddingWorld, path: str, stream: bool) -> None:
    """Clients must not be able to tell them apart but by the header and the time: the same events, end and usage."""
    body = {**REQUESTS[path], "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    use, fresh = await ask(world, path, body)
    assert use == "miss"
    before = num_dispatched(world)
    use, cached = await ask(world, path, body)
    assert use == "hit"
    assert num_dispatched(world) == before
    if not stream:
        assert cached == fresh
        return
    assert folded(cached) == folded(fresh)
    assert len(texts(cached)) == _NUM_TOKENS * body.get(
        "n", 1
    )  # one for each token, as a reader that keeps up gets them


async def test_what_the_client_refuses_is_neither_read_nor_kept(world: EmbeddingWorld) -> None:
    """Someone who measures an engine, or asks for what must not stay, has to get a new answer."""
    path = "/v1/chat/completions"
    for headers in ({"x-kvloom-cache": "off"}, {"Cache-Control": "no-store"}):
        assert (await ask(world, path, CHAT, **headers))[0] == "off"
    assert (await ask(world, path, CHAT))[0] == "miss"
    assert (await ask(world, path, CHAT, **{"x-kvloom-cache": "off"}))[0] == "off"
    assert (await ask(world, path, CHAT))[0] == "hit"
    status, _ = await world.post(path, {"x-kvloom-cache": "maybe"}, **CHAT)
    assert status == 400


@pytest.mark.parametrize("change", [{"temperature": 1.0}, {"logprobs": True}])
async def test_what_is_not_deterministic_is_not_asked_for(world: EmbeddingWorld, change: dict[str, Any]) -> None:
    """A drawn seed stands for the wish for another answer each time, although every router gets one."""
    for _ in range(2):
        use, _ = await ask(world, "/v1/chat/completions", {**CHAT, **change})
        assert use == "off"


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 11},
        {"stop": ["x"]},
        {"messages": [{"role": "user", "content": "another fox"}]},
        {"n": 2},
        {"seed": 1, "temperature": 0.5},
    ],
)
async def test_another_request_gets_another_answer(world: EmbeddingWorld, change: dict[str, Any]) -> None:
    """Everything that the answer depends on is in the key."""
    await ask(world, "/v1/chat/completions", CHAT)
    use, _ = await ask(world, "/v1/chat/completions", {**CHAT, **change})
    assert use == "miss"


async def test_embeddings(world: EmbeddingWorld) -> None:
    """They are deterministic; a call with a new input computes that one only."""
    use, fresh = await ask(world, "/v1/embeddings", {"input": ["the fox", "a dog"]})
    assert use == "miss"
    assert await ask(world, "/v1/embeddings", {"input": ["the fox", "a dog"]}) == ("hit", fresh)
    before = num_dispatched(world)
    assert (await ask(world, "/v1/embeddings", {"input": ["the fox", "a bird"]}))[0] == "miss"
    assert num_dispatched(world) == before + 1


async def test_generate_over_grpc(world: EmbeddingWorld) -> None:
    """The router is the one place that all callers pass: its own RPC has the cache as well."""
    stub = await world.fabric.stub()
    request = GenerateRequest(
        model=MODEL, text="the quick fox", sampling=SamplingParams(temperature=0), stop=StopConditions(max_tokens=9)
    )

    async def generate(wanted: GenerateRequest) -> tuple[int, str, Any]:
        responses: list[GenerateResponse] = [response async for response in stub.Generate(wanted)]
        deltas = [delta for response in responses for delta in response.deltas]
        uses = {delta.start.result_cache for delta in deltas if delta.HasField("start")}
        finish = next(delta.finish for delta in deltas if delta.HasField("finish"))
        finish.ClearField("result_cache")
        ids = [token_id for delta in deltas for token_id in delta.token_ids]
        return uses.pop(), "".join(delta.text for delta in deltas), (ids, finish)

    first, second = await generate(request), await generate(request)
    assert (first[0], second[0]) == (RESULT_CACHE_USE_MISS, RESULT_CACHE_USE_HIT)
    assert first[1:] == second[1:]
    request.no_result_cache = True
    assert (await generate(request))[0] == 0


async def test_metrics_count_what_clients_were_told(world: EmbeddingWorld) -> None:
    """An operator judges by the share of hits whether the memory is worth it."""
    for _ in range(3):
        await ask(world, "/v1/chat/completions", CHAT)
    metric = world.fabric.metric
    assert metric("kvloom_router_result_cache_requests_total", outcome="hit") == 2
    assert metric("kvloom_router_result_cache_requests_total", outcome="miss") == 1
    assert metric("kvloom_router_result_cache_answers") == 1
    assert metric("kvloom_router_result_cache_bytes") > 100


async def test_clearing(world: EmbeddingWorld) -> None:
    """What a tenant must not get any more goes at once, and only that."""
    stub = await world.fabric.stub()
    await ask(world, "/v1/chat/completions", CHAT)
    assert (await stub.ClearResultCache(ClearResultCacheRequest(tenant="someone else"))).num_answers == 0
    assert (await ask(world, "/v1/chat/completions", CHAT))[0] == "hit"
    assert (await stub.ClearResultCache(ClearResultCacheRequest())).num_answers == 1
    assert (await ask(world, "/v1/chat/completions", CHAT))[0] == "miss"


async def test_what_another_router_has_answered(router_redis_url: str, tokenizer: ModelTokenizer) -> None:
    """The request waits for Redis and not for a shard; and a client that leaves meanwhile leaves nothing behind."""

    def configure(config: KvloomConfig) -> None:
        _enable(config)
        config.router.result_cache.shared = True

    async with embedding_world(router_redis_url, tokenizer, sim_engine(), configure=configure) as world:
        keeper = world.fabric.server.features.recorder
        assert keeper is not None
        assert world.fabric.server.features.shared_results is not None
        world.fabric.server.features.shared_results._timeout_seconds = 1.0  # this machine may be busy
        assert (await ask(world, "/v1/chat/completions", CHAT))[0] == "miss"
        before = num_dispatched(world)
        for _ in range(100):  # until the answer is in Redis
            keeper.clear(None)  # as if this router had not been the one that answered
            if (await ask(world, "/v1/chat/completions", CHAT))[0] == "hit":
                break
        assert num_dispatched(world) - before < 100
        handle = world.fabric.submit([5, 6], 4, Collected(1), sampling=SamplingParams(temperature=0))
        world.fabric.link.cancel(handle)
        await world.fabric.server._driver.wait_idle()
        assert (await ask(world, "/v1/chat/completions", CHAT))[0] == "hit"
