"""Requests carry their caller's name into the fabric, and callers are isolated from one another at the edge."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict

from kvloom_common.callers import Callers
from kvloom_common.config import EdgeConfig
from tests.fakes.edge_peers import edges
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_control import key_of, two_organisations
from tests.fakes.fake_router_link import answer
from tests.fakes.resume_world import CHAT, client
from tests.fakes.scripted_answer import begin_live, kill, kinds
from tests.fakes.tenants import callers_of

BEARER = {"Authorization": "Bearer one"}


async def tenant_of(world: EdgeWorld, **headers: str) -> str:
    """The tenant of a request with these headers, as the router gets it."""
    async with world.http.post(world.url + CHAT, json=chat_body(), headers=headers) as response:
        assert response.status == 200
    return world.link.requests[-1].request.submit.tenant


async def post_from(world: EdgeWorld, address: str, **fields: Any) -> str:
    """Stream an answer under the Idempotency-Key "k" from a loopback address. Returns the response's id."""
    connector = aiohttp.TCPConnector(local_addr=(address, 0))
    headers = {"x-kvloom-resume": "on", "Idempotency-Key": "k"}
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.post(world.url + CHAT, json=chat_body(stream=True, **fields), headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        await response.read()
        return response.headers["x-kvloom-response-id"]


async def test_tenant_is_the_credential_or_the_address() -> None:
    """The engine's cache and the router's queues keep tenants apart, so every request has to say whose it is."""
    async with edge_world() as world:
        world.link.script = answer("a")
        one = await tenant_of(world, **BEARER)
        assert one == Callers().name("one", "")
        assert await tenant_of(world, **BEARER) == one
        assert await tenant_of(world, Authorization="Bearer two") != one
        assert await tenant_of(world, **{"x-api-key": "k"}) == Callers().name("k", "")
        assert await tenant_of(world, **{"x-api-key": "one"}, **BEARER) == one
        assert await tenant_of(world) == Callers().name("", "127.0.0.1")


SEVERAL_CREDENTIALS: list[list[tuple[str, str]]] = [
    [("Authorization", "Bearer one"), ("Authorization", "Bearer two")],
    [("x-api-key", "one"), ("x-api-key", "two")],
]


@pytest.mark.parametrize("headers", SEVERAL_CREDENTIALS)
@pytest.mark.parametrize("has_tenants", [False, True])
async def test_a_request_with_several_credentials_is_refused(
    headers: list[tuple[str, str]], has_tenants: bool, tmp_path: Path
) -> None:
    """A proxy that checks one of them must not let another one pass; router and edge would choose differently."""
    entries = [*two_organisations(), key_of("one", "acme/search"), key_of("two", "acme/maps")]
    async with edge_world(callers=callers_of(tmp_path, entries) if has_tenants else Callers()) as world:
        world.link.script = answer("a")
        several = CIMultiDict(headers)
        async with world.http.post(world.url + CHAT, json=chat_body(), headers=several) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, headers[0][0].lower())
        assert not world.link.requests
        for key in ("one", "another"):  # clients send what they have, for whichever server
            both = {"Authorization": "Bearer one", "x-api-key": key}
            async with world.http.post(world.url + CHAT, json=chat_body(), headers=both) as response:
                assert response.status == 200


async def test_address_behind_a_trusted_proxy() -> None:
    """All anonymous clients of a proxy would be one caller, and without trust anybody could claim an address."""
    forwarded = {"X-Forwarded-For": "198.51.100.9, 192.0.2.1"}
    async with edge_world(EdgeConfig(trusted_proxies=["127.0.0.0/8"])) as world:
        world.link.script = answer("a")
        assert await tenant_of(world, **forwarded) == Callers().name("", "192.0.2.1")
        assert await tenant_of(world) == Callers().name("", "127.0.0.1")
    async with edge_world() as world:
        world.link.script = answer("a")
        assert await tenant_of(world, **forwarded) == Callers().name("", "127.0.0.1")


async def test_anonymous_callers_have_their_own_idempotency_keys() -> None:
    """A key that somebody else uses, too, must neither refuse a request nor yield somebody else's answer."""
    async with edge_world() as world:
        world.link.script = answer("a")
        first = await post_from(world, "127.0.0.1")
        assert await post_from(world, "127.0.0.2", max_tokens=3) != first
        assert await post_from(world, "127.0.0.1") == first


async def test_anonymous_callers_share_keys_if_configured() -> None:
    """With callers.anonymous = "shared" all requests without a credential are one caller's."""
    async with edge_world(callers=Callers(anonymous_share=True)) as world:
        world.link.script = answer("a")
        first = await post_from(world, "127.0.0.1")
        assert await post_from(world, "127.0.0.2") == first
        assert await tenant_of(world) == ""


async def test_anonymous_client_resumes_from_another_address() -> None:
    """The id of a response cannot be guessed, so a client whose address changes may still use it."""
    async with edge_world() as world:
        world.link.script = answer("a", "b")
        response_id = await post_from(world, "127.0.0.1")
        connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        url = f"{world.url}{CHAT}/{response_id}?stream=true"
        async with aiohttp.ClientSession(connector=connector) as http, http.get(url) as response:
            assert response.status == 200
            assert b"[DONE]" in await response.read()


async def test_answer_that_is_taken_over_keeps_its_caller(redis_url: str) -> None:
    """It continues in the cache and in the share of the caller that began it, and its key remains that caller's."""
    path, body, script = kinds()["chat"]
    async with edges(redis_url) as ((first, one), (second, _)):
        streamed, request, reading = await begin_live(first, path, body, script, 4)
        await kill(first, one, reading)
        again = client(second, path)
        again.response_id = streamed.response_id
        back = asyncio.create_task(again.resume())
        rest = await second.link.next_request()
        script.play(rest, 4)
        await back
        assert rest.request.submit.tenant == request.request.submit.tenant == Callers().name("secret", "")


async def test_answer_that_is_taken_over_keeps_its_key(redis_url: str, tmp_path: Path) -> None:
    """The rest of it is charged to whom its beginning was charged to."""
    path, body, script = kinds()["chat"]
    callers = callers_of(tmp_path, [*two_organisations(), key_of("secret", "acme/search")])
    async with edges(redis_url, callers=callers) as ((first, one), (second, _)):
        streamed, request, reading = await begin_live(first, path, body, script, 4)
        await kill(first, one, reading)
        again = client(second, path)
        again.response_id = streamed.response_id
        back = asyncio.create_task(again.resume())
        rest = await second.link.next_request()
        script.play(rest, 4)
        await back
        for found in (rest.request.submit, request.request.submit):
            assert (found.tenant, found.key_id) == ("acme/search", "id-secret")
