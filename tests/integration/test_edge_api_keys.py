"""The HTTP API with API keys: who has none gets no further than the health checks and the chat page."""

from __future__ import annotations

import io

import openai
import pytest

from kvloom_common.access.api_keys import ApiKey, ApiKeys, digest_of
from kvloom_common.callers import Callers
from tests.fakes.edge_world import chat_body, edge_world
from tests.fakes.fake_router_link import answer

KEY = "kvl-test"
CLOSED = [
    "/v1/models",
    "/v1/models/tiny",
    "/v1/chat/completions/chatcmpl-x",
    "/metrics",
    "/metrics/targets",
    "/unknown",
]
OPEN = ["/health", "/live", "/ready", "/version", "/", "/chat.js"]


def callers() -> Callers:
    return Callers(api_keys=ApiKeys([ApiKey("alice", digest_of(KEY))]))


async def test_requests_without_a_valid_key_are_refused() -> None:
    """Every route but the open ones serves something that belongs to somebody."""
    async with edge_world(callers=callers()) as world:
        for path in CLOSED:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": KEY + "x"}):
                async with world.http.get(world.url + path, headers=headers) as response:
                    assert response.status == 401, path
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    assert (await response.json())["error"]["code"] == "invalid_api_key"
        status, body = await world.post("/v1/chat/completions", chat_body())
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        assert not world.link.requests
        for path in OPEN:
            async with world.http.get(world.url + path) as response:
                assert response.status == 200, path


async def test_a_valid_key_names_the_caller() -> None:
    """Both headers are usual; whoever uses both is one caller."""
    async with edge_world(callers=callers()) as world:
        world.link.script = answer("a")
        for headers in ({"Authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
            status, _ = await world.post("/v1/chat/completions", chat_body(), headers=headers)
            assert status == 200
            assert world.link.requests[-1].request.submit.tenant == "key-alice"


async def test_the_official_client_reports_the_error() -> None:
    """Clients tell a wrong key from other failures by the exception, and do not retry it."""
    async with edge_world(callers=callers()) as world:
        world.link.script = answer("a")
        async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError, match="not valid"):
                await client.models.list()
        async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=KEY) as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_a_large_body_is_not_read_before_the_key_is_checked() -> None:
    """Strangers must not fill the memory for bodies."""
    async with edge_world(callers=callers()) as world:
        body = io.BytesIO(b"x" * world.edge.config.max_body_bytes)
        async with world.http.post(world.url + "/v1/chat/completions", data=body) as response:
            assert response.status == 401
        assert world.edge.admission.bodies.num_leases == 0
