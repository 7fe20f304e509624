"""APIs that kvloom does not have are refused by name."""

from __future__ import annotations

import openai
import pytest

from tests.fakes.edge_world import edge_world
from tests.fakes.fake_router_link import answer


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/audio/transcriptions", "Audio"),
        ("/v1/images/generations", "Images"),
        ("/v1/realtime", "Realtime"),
        ("/v1/assistants", "Assistants"),
        ("/v1/threads/t1/runs", "Threads"),
        ("/v1/files", "Files"),
        ("/v1/batches/b1/cancel", "Batch"),
        ("/v1/fine_tuning/jobs", "Fine-tuning"),
        ("/v1/vector_stores/v/files", "Vector stores"),
        ("/v1/uploads", "Uploads"),
        ("/v1/edits", "Edits"),
    ],
)
async def test_named_refusals(path: str, name: str) -> None:
    """A user learns that the API is missing, and what there is instead, whatever the method."""
    async with edge_world() as world:
        for method in ("GET", "POST", "DELETE"):
            async with world.http.request(method, world.url + path) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (501, "not_implemented")
                assert f"does not have the {name} API" in error["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1/input_items"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/chat/completions/chatcmpl-1"),
        ("DELETE", "/v1/chat/completions/chatcmpl-1"),
        ("GET", "/v1/chat/completions/chatcmpl-1/messages"),
        ("POST", "/v1/messages/batches"),
        ("GET", "/v1/messages/batches/b1/results"),
    ],
)
async def test_operations_that_are_missing(method: str, path: str) -> None:
    """That the method is wrong would mislead: these exist elsewhere. A retry does not help."""
    async with edge_world() as world, world.http.request(method, world.url + path) as response:
        assert response.status == 501, await response.text()
        assert "This server does not" in (await response.json())["error"]["message"]
        assert response.headers["x-should-retry"] == "false"


async def test_input_tokens_of_a_response() -> None:
    """They are those of the response itself, as official clients count them."""
    async with edge_world() as world:
        world.link.script = answer("x")
        body = {"model": "tiny", "input": "the fox", "instructions": "Be brief."}
        status, counted = await world.post("/v1/responses/input_tokens", body)
        assert (status, counted["object"]) == (200, "response.input_tokens")
        _, answered = await world.post("/v1/responses", body)
        assert counted["input_tokens"] == answered["usage"]["input_tokens"]
        async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client:
            assert (await client.responses.input_tokens.count(model="tiny", input="the fox")).input_tokens > 0


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/api/v1/models", "/v1/models"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/messages", "/v1/messages"),
        ("/v1/health", "/health"),
        ("/openai/deployments/gpt/chat/completions", "/v1/chat/completions"),
        ("/responses", "/v1/responses"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
    ],
)
async def test_a_wrong_base_url_is_told_the_right_one(path: str, meant: str) -> None:
    """With or without /v1 is the first mistake that everyone makes."""
    async with edge_world() as world, world.http.post(world.url + path, json={}) as response:
        message = (await response.json())["error"]["message"]
        assert response.status == 404
        assert f"Did you mean {meant}?" in message
        assert "base URL" in message


async def test_a_model_that_does_not_exist_is_told_those_that_do() -> None:
    """In every API, so that users find the name without another request."""
    async with edge_world() as world:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
            ("/v1/embeddings", {"input": "x"}),
        ):
            status, answered = await world.post(path, {"model": "gpt-4", **body})
            assert status == 404
            assert "Served are: tiny." in answered["error"]["message"]


async def test_unknown_paths_stay_unknown() -> None:
    """A typo is not taken for a missing API."""
    async with edge_world() as world:
        for path in ("/v1/audiobooks", "/v1/filesystem", "/audio", "/v1", "/v1/", "/v1/chat/embeddings"):
            async with world.http.get(world.url + path) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")


async def test_official_client_shows_the_reason() -> None:
    """Users of the official client read the sentence in its exception."""
    async with (
        edge_world() as world,
        openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="does not have the Files API"):
            await client.files.list()
