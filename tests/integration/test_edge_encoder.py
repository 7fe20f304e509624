"""An encoder behind edge and router: embeddings, ranking, and what it refuses. The built-in one gives transformers'
vectors."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from kvloom_common.config import ShardConfig, TorchConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.torch_engine.engine import TorchEngine
from tests.fakes.embedding_world import EmbeddingWorld, embedding_world
from tests.fakes.failover_world import MODEL
from tests.fakes.tiny_bert import write_tiny_bert
from tests.fakes.word_tokenizer import word_tokenizer
from tests.lazy_imports import imported_when_used

pytestmark = pytest.mark.xdist_group("transformers")  # which takes seconds to import
transformers = imported_when_used("transformers")

pytest_plugins = ("tests.fakes.router_fixtures",)

TEXTS = (
    "That is a happy person",
    "That is a very happy person!",
    "A loom weaves cloth out of threads.",
    "Le métier à tisser fabrique de l'étoffe.",
    "x",
    "The weather is lovely today. " * 40,
)


def encoder_engine(model_dir: Path) -> tuple[TorchEngine, ShardConfig]:
    config = ShardConfig(torch=TorchConfig(num_threads=2))
    return TorchEngine(model_dir, MODEL, config), config


@pytest.fixture
async def small(router_redis_url: str, tmp_path: Path) -> AsyncIterator[EmbeddingWorld]:
    """A fabric with a small random sentence model."""
    tokenizer = word_tokenizer()
    model_dir = write_tiny_bert(tmp_path, pooling="mean_tokens", max_seq_length=64)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    loaded = ModelTokenizer.load(model_dir)
    async with embedding_world(router_redis_url, loaded, encoder_engine(model_dir)) as world:
        yield world


async def test_an_encoder_gives_embeddings_only(small: EmbeddingWorld) -> None:
    """Every API that generates refuses it, and names the reason; /v1/models says what it can do."""
    async with small.http.get(f"{small.url}/v1/models/{MODEL}") as response:
        model = await response.json()
    assert {"embed", "rerank", "score"} <= set(model["capabilities"])
    assert "generate" not in model["capabilities"]
    assert model["max_model_len"] == 64
    message = [{"role": "user", "content": "the loom"}]
    for path, body in {
        "/v1/chat/completions": {"messages": message},
        "/v1/completions": {"prompt": "the loom"},
        "/v1/responses": {"input": "the loom"},
        "/v1/messages": {"messages": message, "max_tokens": 4},
    }.items():
        status, answer = await small.post(path, **body)
        assert status == 400, answer
        assert "gives embeddings only" in answer["error"]["message"]
    status, answer = await small.post("/v1/embeddings", input=["the loom", [2, 5, 3]])
    assert (status, answer["error"]["param"]) == (400, "input")
    status, answer = await small.post("/v1/embeddings", input="the loom " * 32)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_tokens_as_the_encoder_sees_them(small: EmbeddingWorld) -> None:
    """With the tokens around a text; clients that tokenize by themselves send these."""
    status, answer = await small.post("/tokenize", prompt="The looms weave.", return_token_strs=True)
    assert (status, answer["count"]) == (200, 7)
    assert answer["token_strs"][0] == "[CLS]"
    _, text = await small.post("/detokenize", tokens=answer["tokens"])
    assert text == {"prompt": "[CLS] the looms weave. [SEP]"}
    assert await small.embed(answer["tokens"]) == await small.embed("The looms weave.")


async def test_many_callers_share_batches(small: EmbeddingWorld) -> None:
    """The vectors are those that each would have alone, in the order of the inputs."""
    texts = [f"the loom weave a {word}" for word in ("cloth", "cat", "lot", "bomb")]
    alone = [(await small.embed(text))[0] for text in texts]
    found = await asyncio.gather(*(small.embed([*texts, *texts[:number]]) for number in range(4)))
    for number, vectors in enumerate(found):
        for vector, expected in zip(vectors, [*alone, *alone[:number]], strict=True):
            assert vector == pytest.approx(expected, abs=1e-6)


@pytest.fixture
async def built_in(router_redis_url: str, encoder_dir: Path) -> AsyncIterator[EmbeddingWorld]:
    tokenizer = ModelTokenizer.load(encoder_dir)
    async with embedding_world(router_redis_url, tokenizer, encoder_engine(encoder_dir)) as world:
        yield world


def reference(encoder_dir: Path, texts: tuple[str, ...]) -> list[torch.Tensor]:
    """As the model's card says: the mean over the tokens, truncated to 256, and scaled to the length 1."""
    tokenizer = Tokenizer.from_file(str(encoder_dir / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    model = transformers.AutoModel.from_pretrained(encoder_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = [model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0].mean(0) for text in texts]
    return [vector / vector.norm() for vector in found]


async def test_the_built_in_encoder_computes_what_transformers_computes(
    built_in: EmbeddingWorld, encoder_dir: Path
) -> None:
    """From the text in the request to the vector in the response."""
    texts = (*TEXTS[:-1], TEXTS[-1][:1000])
    vectors = await built_in.embed(list(texts))
    expected = await asyncio.to_thread(reference, encoder_dir, texts)
    for vector, wanted in zip(vectors, expected, strict=True):
        found = torch.tensor(vector)
        assert len(found) == 384
        assert abs(float(found.norm()) - 1) < 1e-5
        assert float(found @ wanted) > 0.999


async def test_the_built_in_encoder_ranks_by_meaning(built_in: EmbeddingWorld) -> None:
    """Not by shared words alone."""
    documents = [
        "Cats sleep for most of the day.",
        "The capital of France is Paris.",
        "Weaving turns threads into cloth on a loom.",
    ]
    for query, best in (("How is fabric made?", 2), ("Which city is the French seat of government?", 1)):
        status, answer = await built_in.post("/v1/rerank", query=query, documents=documents)
        assert status == 200
        assert answer["results"][0]["index"] == best
        scores = [result["relevance_score"] for result in answer["results"]]
        assert scores == sorted(scores, reverse=True)
        _, scored = await built_in.post("/v1/score", text_1=query, text_2=documents)
        by_index = {result["index"]: result["relevance_score"] for result in answer["results"]}
        assert [entry["score"] for entry in scored["data"]] == pytest.approx([by_index[i] for i in range(3)], abs=1e-6)
    vectors = [torch.tensor(vector) for vector in await built_in.embed(list(TEXTS[:3]))]
    similarities = {pair: float(vectors[pair[0]] @ vectors[pair[1]]) for pair in itertools.combinations(range(3), 2)}
    assert max(similarities, key=similarities.__getitem__) == (0, 1)
