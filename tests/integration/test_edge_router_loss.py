"""A router dies under an edge: OpenAI's official client notices nothing, or gets an error that states the reason."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from edge_http.server.process import EdgeListenOptions, serve_edge
from kvloom.router_link.group import RouterGroup
from kvloom_common.models.catalogue import load_catalogue
from tests.fakes.router_processes import MODEL, TIMEOUT_SECONDS, RouterProcess, RouterProcesses, router_processes
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(120)

MESSAGES = [{"role": "user", "content": "Tell me something long."}]
OPTIONS = {"model": MODEL, "messages": MESSAGES, "max_tokens": 50, "logprobs": True, "top_logprobs": 2}


@dataclasses.dataclass
class Fabric:
    world: RouterProcesses
    routers: list[RouterProcess]
    link: RouterGroup
    url: str

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"http://{self.url}/v1", api_key="none", max_retries=0)

    async def stream(self, **options) -> AsyncIterator[ChatCompletionChunk]:
        async with self.client() as client:
            wanted = {**OPTIONS, "stream": True, "stream_options": {"include_usage": True}, **options}
            async for chunk in await client.chat.completions.create(**wanted):
                yield chunk


@pytest.fixture
async def fabric(tmp_path: Path, redis_url: str) -> AsyncIterator[Fabric]:
    async with router_processes(tmp_path, redis_url) as world:
        world.config.edge.reattach_seconds = 1.5
        routers = list(await asyncio.gather(world.start_router("router-0"), world.start_router("router-1")))
        link = await world.link(2)
        catalogue = await asyncio.to_thread(load_catalogue, world.config)
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve_edge(
                world.config,
                link,
                catalogue,
                EdgeListenOptions(0),
                stop,
                lambda address, *_others: ready.set_result(address),
            )
        )
        yield Fabric(world, routers, link, await ready)
        stop.set()
        await asyncio.wait_for(serving, TIMEOUT_SECONDS)
        catalogue.close()


def serving_router(fabric: Fabric) -> RouterProcess:
    """Returns the router that serves a request of the edge."""
    (address,) = {member.address for _, member in fabric.link._attached.values()}
    return next(router for router in fabric.routers if router.address == address)


@dataclasses.dataclass
class Seen:
    """The content of a stream's chunks."""

    texts: dict[int, str] = dataclasses.field(default_factory=dict)
    tokens: dict[int, list[tuple[str, float]]] = dataclasses.field(default_factory=dict)
    finish_reasons: dict[int, str] = dataclasses.field(default_factory=dict)
    roles: int = 0
    completion_tokens: int = 0

    def take(self, chunk: ChatCompletionChunk) -> None:
        if chunk.usage is not None:
            self.completion_tokens += chunk.usage.completion_tokens
        for choice in chunk.choices:
            assert choice.index not in self.finish_reasons
            self.texts[choice.index] = self.texts.get(choice.index, "") + (choice.delta.content or "")
            self.roles += choice.delta.role is not None
            for entry in (choice.logprobs.content if choice.logprobs else None) or ():
                self.tokens.setdefault(choice.index, []).append((entry.token, entry.logprob))
            if choice.finish_reason is not None:
                self.finish_reasons[choice.index] = choice.finish_reason


async def test_stream_n_and_logprobs_across_a_kill(fabric: Fabric) -> None:
    """Two choices with logprobs and usage are chunk by chunk the same as in an undisturbed stream."""
    undisturbed, seen = Seen(), Seen()
    async for chunk in fabric.stream(n=2, seed=5, temperature=1.0):
        undisturbed.take(chunk)
    num_chunks = 0
    async for chunk in fabric.stream(n=2, seed=5, temperature=1.0):
        seen.take(chunk)
        num_chunks += 1
        if num_chunks == 20:
            await serving_router(fabric).kill()
    assert seen == undisturbed
    assert seen.completion_tokens == 100
    async with aiohttp.ClientSession() as http, http.get(f"http://{fabric.url}/metrics") as response:
        assert "kvloom_edge_reattached_requests_total 1.0" in await response.text()


async def test_whole_answer_across_a_kill(fabric: Fabric) -> None:
    """An answer that is not streamed is not lost either, and new requests are sent to the remaining router."""
    async with fabric.client() as client:
        undisturbed = await client.chat.completions.create(**OPTIONS, seed=6)
        asked = asyncio.create_task(client.chat.completions.create(**OPTIONS, seed=6))
        attached = fabric.link._attached
        await eventually(lambda: any(tracked.choices[0].token_ids for tracked, _ in attached.values()), "a token")
        await serving_router(fabric).kill()
        answer = await asked
        assert answer.choices == undisturbed.choices
        assert answer.usage is not None
        assert undisturbed.usage is not None
        assert answer.usage.completion_tokens == undisturbed.usage.completion_tokens == 50
        assert (await client.chat.completions.create(**OPTIONS, seed=6)).choices == undisturbed.choices


async def test_all_routers_dead_is_an_error_event_within_the_bound(fabric: Fabric) -> None:
    """The stream ends with router_unavailable, and so do new requests, at once, until a router is back."""
    killed_at = 0.0

    async def read() -> None:
        nonlocal killed_at
        received = ""
        async for chunk in fabric.stream(seed=7):
            received += chunk.choices[0].delta.content or ""
            if len(received) > 20 and not killed_at:
                killed_at = asyncio.get_running_loop().time()
                await asyncio.gather(*(router.kill() for router in fabric.routers))

    with pytest.raises(openai.APIError) as caught:
        await read()
    assert caught.value.code == "router_unavailable"
    assert asyncio.get_running_loop().time() - killed_at < 8.0
    async with fabric.client() as client:
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(**OPTIONS)
        assert (refused.value.status_code, refused.value.code) == (503, "router_unavailable")
        await fabric.world.start_router("router-2")
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not fabric.link.fleet.models:
                await fabric.link.wait_fleet_change()
        assert (await client.chat.completions.create(**OPTIONS)).choices
