"""A generating model and an encoder in one fabric, with the torch engine, as a user starts them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from kvloom import Client
from tests.e2e.conftest import ENCODER, GENERATOR
from tests.e2e.fabric import RunningFabric, run_kvloom

pytestmark = pytest.mark.xdist_group("torch")

DOCUMENTS = ["Cats sleep for most of the day.", "Weaving turns threads into cloth on a loom.", "Paris is in France."]


@pytest.fixture
def fabric(torch_fabric: RunningFabric, encoder_dir: Path) -> RunningFabric:
    return torch_fabric


@pytest.fixture
def one_generating_shard(fabric: RunningFabric) -> Iterator[None]:
    """What asks for the generating model comes to the same shard."""
    shard = f"shard-{GENERATOR}-1"
    assert run_kvloom("drain", shard, env=fabric.env).returncode == 0
    yield
    assert run_kvloom("undrain", shard, env=fabric.env).returncode == 0


@pytest.fixture
async def http(fabric: RunningFabric) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(fabric.http_url, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def test_models_say_what_they_can(http: aiohttp.ClientSession) -> None:
    """Clients choose a model by it."""
    async with http.get("/v1/models") as answer:
        models = (await answer.json())["data"]
    found = {model["id"]: set(model["capabilities"]) & {"generate", "embed", "rerank", "score"} for model in models}
    assert found == {GENERATOR: {"generate", "embed"}, ENCODER: {"embed", "rerank", "score"}}


async def test_each_model_does_what_it_can_and_refuses_the_rest(
    fabric: RunningFabric, http: aiohttp.ClientSession
) -> None:
    """In the words of the API."""
    async with openai.AsyncOpenAI(base_url=f"{fabric.http_url}/v1", api_key="none", max_retries=0) as client:
        for model, size in ((GENERATOR, 576), (ENCODER, 384)):
            answer = await client.embeddings.create(model=model, input=DOCUMENTS)
            assert [len(entry.embedding) for entry in answer.data] == [size] * 3
        message: Any = [{"role": "user", "content": "Say hello."}]
        reply = await client.chat.completions.create(model=GENERATOR, messages=message, max_tokens=4)
        assert reply.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="gives embeddings only"):
            await client.chat.completions.create(model=ENCODER, messages=message, max_tokens=4)
    status, ranking = await post(http, "/v1/rerank", model=ENCODER, query="How is fabric made?", documents=DOCUMENTS)
    assert (status, ranking["results"][0]["index"]) == (200, 1)
    status, refusal = await post(http, "/v1/rerank", model=GENERATOR, query="How is fabric made?", documents=DOCUMENTS)
    assert (status, refusal["error"]["param"]) == (400, "model")
    assert "no capability 'rerank'" in refusal["error"]["message"]


async def test_the_sdk(fabric: RunningFabric, http: aiohttp.ClientSession) -> None:
    """Straight to the router, which tokenizes."""
    async with Client(fabric.router_address) as client:
        found = await client.embed(DOCUMENTS, model=ENCODER)
    status, answer = await post(http, "/v1/embeddings", model=ENCODER, input=DOCUMENTS)
    assert status == 200
    for one, entry in zip(found, answer["data"], strict=True):
        assert list(one.vector) == pytest.approx(entry["embedding"], abs=1e-6)


@pytest.mark.usefixtures("one_generating_shard")
async def test_answers_go_on_beside_embeddings(http: aiohttp.ClientSession) -> None:
    """On the shard that does both: texts of many steps are embedded while an answer streams, and it stays the same."""
    body = {"model": GENERATOR, "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    _, alone = await post(http, "/v1/completions", **body)
    text, embedding, num_beside = "", None, 0
    async with http.post("/v1/completions", json={**body, "stream": True}) as answer:
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            text += json.loads(line[6:])["choices"][0]["text"]
            if embedding is None:
                texts = ["weave the cloth " * 60] * 6
                embedding = asyncio.create_task(post(http, "/v1/embeddings", model=GENERATOR, input=texts))
            num_beside += not embedding.done()
    assert embedding is not None
    status, answer = await embedding
    assert (status, len(answer["data"])) == (200, 6)
    assert text == alone["choices"][0]["text"]
    assert num_beside > 3  # a token in each of the steps that embed: the answer was not held up until their end
