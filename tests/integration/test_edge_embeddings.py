"""POST /v1/embeddings, /v1/rerank and /v1/score, over an edge, a router and simulated shards."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.config import EdgeConfig
from shard_server.engines.sim_tokens import EMBEDDING_SIZE
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.embedding_world import EmbeddingWorld, embedding_world, sim_engine
from tests.fakes.failover_world import MODEL
from tests.fakes.fake_safety import FORBIDDEN
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)


@pytest.fixture
async def world(router_redis_url: str) -> AsyncIterator[EmbeddingWorld]:
    async with embedding_world(router_redis_url, model_tokenizer(), sim_engine()) as started:
        yield started


async def test_every_form_of_input(world: EmbeddingWorld) -> None:
    """A text has one vector, whether it comes alone, among others, or as tokens."""
    texts = ["the quick fox", "a lazy dog"]
    ids = [list(await model_tokenizer().encode(text)) for text in texts]
    first, second = await world.embed(texts)
    assert await world.embed(texts[0]) == [first]
    assert await world.embed(ids[0]) == [first]
    assert await world.embed(ids) == [first, second]
    assert first != second
    assert len(first) == EMBEDDING_SIZE
    assert math.isclose(math.hypot(*first), 1.0, rel_tol=1e-5)


async def test_formats_dimensions_and_usage(world: EmbeddingWorld) -> None:
    """What OpenAI's clients rely on."""
    status, answer = await world.post("/v1/embeddings", input="the fox", user="someone")
    num_tokens = len(await model_tokenizer().encode("the fox"))
    assert status == 200
    assert (answer["object"], answer["model"], answer["data"][0]["object"]) == ("list", MODEL, "embedding")
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    vector = answer["data"][0]["embedding"]
    (packed,) = await world.embed("the fox", encoding_format="base64")
    assert list(struct.unpack(f"<{EMBEDDING_SIZE}f", base64.b64decode(packed))) == vector
    (short,) = await world.embed("the fox", dimensions=8)
    length = math.hypot(*vector[:8])
    assert short == pytest.approx([value / length for value in vector[:8]], abs=1e-6)
    (raw,) = await world.embed("the fox", normalize=False, pooling="last")
    assert math.hypot(*raw) > 1.5
    metered = world.fabric.metrics.get_sample_value
    labels = {"model": MODEL, "token_type": "input"}
    total = sum(
        sample.value
        for metric in world.fabric.metrics.collect()
        for sample in metric.samples
        if sample.name == "kvloom_router_tokens_total" and sample.labels["token_type"] != "output"
    )
    assert total >= 4 * num_tokens, (metered("kvloom_router_tokens_total", labels), total)


async def test_more_inputs_than_are_in_the_fabric_at_a_time(world: EmbeddingWorld) -> None:
    """They come back in their order; none is lost."""
    inputs = [[number + 1, 5] for number in range(300)]
    vectors = await world.embed(inputs, encoding_format="base64")
    assert len(set(vectors)) == 300
    assert await world.embed(inputs[299], encoding_format="base64") == [vectors[299]]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input[1]"),
        ({"input": ["a", 1]}, 400, "input"),
        ({"input": [[1], []]}, 400, "input[1]"),
        ({"input": [1, 99999]}, 400, "input[1]"),
        ({"input": [-1]}, 400, "input[0]"),
        ({"input": ["a"] * 2049}, 400, "input"),
        ({"input": {"text": "a"}}, 400, "input"),
        ({"input": "the " * 2000}, 400, "input"),
        ({"input": [[1] * 1001] * 300}, 413, "input"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions"),
        ({"input": "a", "dimensions": EMBEDDING_SIZE + 1}, 400, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ({"input": "a", "model": "another"}, 404, "model"),
        ({"input": "a", "pooling": "max"}, 400, "pooling"),
        ({"input": "a", "temperature": 1}, 400, "temperature"),
    ],
)
async def test_bad_requests_name_the_field(body: dict[str, Any], status: int, field: str, fleet: EdgeWorld) -> None:
    """Whoever sends something wrong learns what."""
    found, answer = await fleet.post("/v1/embeddings", {"model": "tiny", **body})
    assert (found, answer["error"]["param"]) == (status, field), answer


@pytest.fixture
async def fleet() -> AsyncIterator[EdgeWorld]:
    """An edge whose router knows a model that embeds and generates, with a window of 1024 tokens."""
    async with edge_world(EdgeConfig(max_body_bytes=8 * 2**20)) as started:
        tell(started, "embed", "generate", "rerank", "score")
        yield started


def tell(world: EdgeWorld, *capabilities: str) -> None:
    model = ModelInfo(name="tiny", num_ready_shards=1, max_model_len=1024, capabilities=capabilities)
    model.embedding_size = EMBEDDING_SIZE if "embed" in capabilities else 0
    world.link.tell(FleetState(models=[model]))


async def test_models_that_cannot(fleet: EdgeWorld) -> None:
    """The error names the model, whichever API is asked for what it cannot do."""
    tell(fleet, "embed")
    for path, body in {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
    }.items():
        status, answer = await fleet.post(path, {"model": "tiny", **body})
        assert (status, answer["error"]["param"]) == (400, "model")
    tell(fleet, "generate")
    for path, body in {
        "/v1/embeddings": {"input": "hi"},
        "/v1/rerank": {"query": "hi", "documents": ["a"]},
        "/v1/score": {"text_1": "a", "text_2": "b"},
    }.items():
        status, answer = await fleet.post(path, {"model": "tiny", **body})
        assert (status, answer["error"]["param"]) == (400, "model")
        assert "no embeddings" in answer["error"]["message"]
    tell(fleet, "generate", "embed")
    for use, body in {"rerank": {"query": "hi", "documents": ["a"]}, "score": {"text_1": "a", "text_2": "b"}}.items():
        status, answer = await fleet.post(f"/v1/{use}", {"model": "tiny", **body})
        assert (status, answer["error"]["param"]) == (400, "model")
        assert f"no capability '{use}'" in answer["error"]["message"]
    assert not fleet.link.requests


async def test_a_client_that_leaves_cancels_its_inputs(fleet: EdgeWorld) -> None:
    """Those that are in the fabric are cancelled there, and the others never arrive."""
    asking = asyncio.create_task(fleet.post("/v1/embeddings", {"model": "tiny", "input": ["a fox"] * 500}))
    requests = [await fleet.link.next_request() for _ in range(128)]
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    for request in requests:
        async with asyncio.timeout(5):
            await request.cancelled.wait()
    await eventually(lambda: not fleet.edge.admission.num_running, "the end of the request")
    assert len(fleet.link.requests) == 128


async def test_an_idempotency_key_stands_for_the_answer(world: EmbeddingWorld) -> None:
    """A client that repeats a call after a timeout pays once."""
    headers = {"Idempotency-Key": "once", "Authorization": "Bearer me"}
    body = {"model": MODEL, "input": ["the fox", "a dog"]}
    answers = []
    for _ in range(2):
        async with world.http.post(world.url + "/v1/embeddings", json=body, headers=headers) as response:
            assert response.status == 200
            answers.append((await response.read(), response.headers.get("Idempotent-Replayed")))
    assert answers[0][0] == answers[1][0]
    assert [replayed for _, replayed in answers] == [None, "true"]
    assert world.fabric.members["shard-0"].engine.num_submitted == 2


async def test_texts_are_screened_in_every_form(router_redis_url: str) -> None:
    """No API is a way around the safety policy."""
    text = f"a {FORBIDDEN} thing"
    ids = list(await model_tokenizer().encode(text))
    async with embedding_world(router_redis_url, model_tokenizer(), sim_engine(), screens=True) as world:
        assert len(await world.embed(["the fox", "a dog"])) == 2
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/embeddings", {"input": text}),
            ("/v1/embeddings", {"input": ["fine", text]}),
            ("/v1/embeddings", {"input": ids}),
            ("/v1/rerank", {"query": text, "documents": ["a"]}),
            ("/v1/rerank", {"query": "a", "documents": ["b", {"text": text}]}),
            ("/v1/score", {"text_1": "a", "text_2": ["b", text]}),
        ]
        for path, body in bodies:
            status, answer = await world.post(path, **body)
            assert (status, answer["error"]["code"]) == (400, "content_filter"), answer


async def test_a_lost_shard_costs_no_embedding(router_redis_url: str) -> None:
    """What it had not computed is computed by another shard, with the same vectors."""
    shards = [sim_engine(max_prefill_tokens_per_step=16) for _ in range(2)]
    async with embedding_world(router_redis_url, model_tokenizer(), *shards) as world:
        texts = [f"the quick brown fox {number}" for number in range(60)]
        expected = await world.embed(texts)
        world.fabric.members["shard-0"].engine.die()
        assert await world.embed(texts) == expected


async def test_an_engine_that_fails_an_embedding_is_not_the_last(router_redis_url: str) -> None:
    """The router tries another shard, as for an answer."""
    async with embedding_world(router_redis_url, model_tokenizer(), sim_engine(), sim_engine()) as world:
        expected = await world.embed("the fox")
        world.fabric.members["shard-0"].engine.die()
        for _ in range(4):
            assert await world.embed("the fox") == expected


async def test_rerank(world: EmbeddingWorld) -> None:
    """The document with the query's words comes first, in the shapes of Cohere and Jina."""
    body = {"query": "the quick fox", "documents": ["lazy dogs", "the quick fox", {"text": "the quick dog"}]}
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        status, answer = await world.post(path, **body)
        assert status == 200
        assert [result["index"] for result in answer["results"]] == [1, 2, 0]
        assert answer["results"][0]["relevance_score"] == pytest.approx(1.0)
        assert "document" not in answer["results"][0]
        assert answer["usage"]["total_tokens"] > 0
    status, answer = await world.post("/v1/rerank", top_n=1, return_documents=True, **body)
    assert [result["document"] for result in answer["results"]] == [{"text": "the quick fox"}]


async def test_score(world: EmbeddingWorld) -> None:
    """One text against several, and texts in pairs."""
    for path in ("/v1/score", "/score"):
        status, answer = await world.post(path, text_1="the fox", text_2=["the fox", "lazy dogs"])
        assert status == 200
        same, other = (entry["score"] for entry in answer["data"])
        assert same == pytest.approx(1.0)
        assert other < same
    _, pairs = await world.post("/score", text_1=["the fox", "lazy dogs"], text_2=["lazy dogs", "lazy dogs"])
    assert [entry["score"] for entry in pairs["data"]] == pytest.approx([other, 1.0])


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"text": ""}]}, "documents[1].text"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
    ],
)
async def test_bad_rankings_name_the_field(path: str, body: dict[str, Any], field: str, fleet: EdgeWorld) -> None:
    """As for embeddings."""
    status, answer = await fleet.post(path, {"model": "tiny", **body})
    assert (status, answer["error"]["param"]) == (400, field), answer


async def test_the_official_client(world: EmbeddingWorld) -> None:
    """It asks for base64 unless told otherwise, and decodes it."""
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.embeddings.create(model=MODEL, input=["the fox", "a dog"])
        assert [len(entry.embedding) for entry in answer.data] == [EMBEDDING_SIZE] * 2
        floats = await client.embeddings.create(model=MODEL, input="the fox", encoding_format="float", dimensions=16)
        assert len(floats.data[0].embedding) == 16
        with pytest.raises(openai.BadRequestError, match="must not be empty"):
            await client.embeddings.create(model=MODEL, input="")
