"""Embeddings by the SDK and by gRPC: the same vectors as over HTTP."""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvloom import Client, ErrorReason, KvloomError
from kvloom.v1.generation_pb2 import POOLING_KIND_LAST, Pooling
from kvloom.v1.router_service_pb2 import Conversation, GenerateRequest, Message, TokenIds
from shard_server.engines.sim_tokens import EMBEDDING_SIZE
from tests.fakes.embedding_world import EmbeddingWorld, embedding_world, sim_engine
from tests.fakes.failover_world import MODEL
from tests.fakes.fake_safety import FORBIDDEN
from tests.fakes.tiny_tokenizer import model_tokenizer

pytest_plugins = ("tests.fakes.router_fixtures",)


@pytest.fixture
async def world(router_redis_url: str) -> AsyncIterator[EmbeddingWorld]:
    async with embedding_world(router_redis_url, model_tokenizer(), sim_engine()) as started:
        yield started


async def test_texts_and_token_ids(world: EmbeddingWorld) -> None:
    """Texts are tokenized by the router, as the edge does it; token ids travel over the shared stream."""
    texts = ["the quick fox", "a lazy dog"]
    ids = [list(await model_tokenizer().encode(text)) for text in texts]
    expected = await world.embed(texts)
    async with Client(world.fabric.address) as client:
        for inputs in (texts, ids, [texts[0], ids[1]]):
            found = await client.embed(inputs, model=MODEL)
            assert [list(one.vector) for one in found] == [pytest.approx(vector, abs=1e-6) for vector in expected]
            assert [one.num_prompt_tokens for one in found] == [len(one) for one in ids]
        for single in (texts[1], ids[1]):
            (one,) = await client.embed(single, model=MODEL)
            assert list(one.vector) == pytest.approx(expected[1], abs=1e-6)
        (raw,) = await client.embed(texts[0], model=MODEL, pooling="last", normalize=False)
        assert math.hypot(*raw.vector) > 1.5
        many = await client.embed([[number + 1, 5] for number in range(100)], model=MODEL)
        assert len({tuple(one.vector) for one in many}) == 100


@pytest.mark.parametrize(
    ("inputs", "changes", "reason", "field"),
    [
        ("", {}, ErrorReason.INVALID_ARGUMENT, "inputs"),
        ([], {}, ErrorReason.INVALID_ARGUMENT, "inputs"),
        (["a", ""], {}, ErrorReason.INVALID_ARGUMENT, "inputs[1]"),
        (["a", 1], {}, ErrorReason.INVALID_ARGUMENT, "inputs"),
        (["a", None], {}, ErrorReason.INVALID_ARGUMENT, "inputs[1]"),
        ([[1], [-1]], {}, ErrorReason.INVALID_ARGUMENT, "inputs[1]"),
        ("a", {"pooling": "max"}, ErrorReason.INVALID_ARGUMENT, "pooling"),
        (["a", "b"], {"model": "another"}, ErrorReason.MODEL_NOT_FOUND, "model"),
    ],
)
async def test_bad_arguments(
    world: EmbeddingWorld, inputs: Any, changes: dict[str, Any], reason: ErrorReason, field: str
) -> None:
    """They are named, and no engine hears of them."""
    async with Client(world.fabric.address, max_retries=0) as client:
        with pytest.raises(KvloomError) as raised:
            await client.embed(inputs, **{"model": MODEL, **changes})
    assert (raised.value.reason, raised.value.field) == (reason, field)
    assert not world.fabric.members["shard-0"].engine.num_submitted


async def test_one_rpc_for_any_language(world: EmbeddingWorld) -> None:
    """Generate with a Pooling gives one response, whose finish has the vector."""
    stub = await world.fabric.stub()
    request = GenerateRequest(model=MODEL, text="the quick fox", pooling=Pooling(kind=POOLING_KIND_LAST))
    responses = [response async for response in stub.Generate(request)]
    (delta,) = responses[-1].deltas
    assert len(struct.unpack(f"<{EMBEDDING_SIZE}f", delta.finish.embedding)) == EMBEDDING_SIZE
    assert delta.finish.num_output_tokens == 0
    conversation = Conversation(messages=[Message(role="user", content="hi")])
    for wrong in (
        GenerateRequest(model=MODEL, conversation=conversation, pooling=Pooling()),
        GenerateRequest(model=MODEL, token_ids=TokenIds(ids=[1]), n=2, pooling=Pooling()),
        GenerateRequest(model=MODEL, text="a", pooling=Pooling(kind=17)),
    ):
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            [response async for response in stub.Generate(wrong)]


async def test_the_safety_policy_holds(router_redis_url: str) -> None:
    """The SDK is no way around it."""
    async with (
        embedding_world(router_redis_url, model_tokenizer(), sim_engine(), screens=True) as world,
        Client(world.fabric.address, max_retries=0) as client,
    ):
        ids = list(await model_tokenizer().encode(f"a {FORBIDDEN} thing"))
        for inputs in (["fine", f"a {FORBIDDEN} thing"], ids):
            with pytest.raises(KvloomError) as raised:
                await client.embed(inputs, model=MODEL)
            assert raised.value.reason == ErrorReason.CONTENT_FILTERED
