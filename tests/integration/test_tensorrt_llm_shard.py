"""The shard server with the TensorRT-LLM adapter and a fake library, over sockets, as a router sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvloom.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
)
from kvloom_common.config import KvloomConfig, ModelConfig, ShardConfig
from kvloom_common.text.block_hash import block_hashes, root_hash
from tests.conformance.engine_driver import prompt_of
from tests.fakes.fake_tensorrt_llm import FakeTensorRtLlm, installed_tensorrt_llm
from tests.fakes.shard_world import ShardWorld, shard_world, text_of
from tests.fakes.tensorrt_llm_engine import make_tensorrt_llm_engine


@pytest.fixture
def library() -> Iterator[FakeTensorRtLlm]:
    with installed_tensorrt_llm() as fake:
        yield fake


@contextlib.asynccontextmanager
async def world_of(**shard_fields: Any) -> AsyncIterator[ShardWorld]:
    config = KvloomConfig(model=ModelConfig(name="model"), shard=ShardConfig(engine="tensorrt_llm", **shard_fields))
    async with shard_world(config, make_tensorrt_llm_engine(**shard_fields)) as world:
        yield world


@pytest.mark.usefixtures("library")
async def test_an_answer_comes_with_its_text_and_its_blocks():
    """The blocks' hashes are specific to the tenant."""
    async with world_of() as world:
        router = await world.router()
        prompt = prompt_of(1, 40)
        await router.submit(1, prompt, max_tokens=30, cache_salt="tenant")
        await router.read_until(lambda: 1 in router.finishes)
        assert router.finishes[1].reason == FINISH_REASON_LENGTH
        assert router.finishes[1].num_output_tokens == len(router.tokens[1]) == 30
        assert router.text[1] == text_of(router.tokens[1])
        wanted = set(block_hashes(prompt, 16, root_hash("model", cache_salt="tenant")))
        await router.read_until(lambda: wanted <= router.cached)
        await router.submit(2, prompt, max_tokens=2, cache_salt="tenant")
        await router.submit(3, prompt, max_tokens=2, cache_salt="another")
        await router.read_until(lambda: router.finishes.keys() == {1, 2, 3})
        assert router.finishes[2].num_cached_tokens == 32
        assert router.finishes[3].num_cached_tokens == 0


async def test_a_cancelled_answer_is_aborted_in_the_library(library: FakeTensorRtLlm):
    """The finish is sent at once, and the GPU is free soon after."""
    async with world_of() as world:
        router = await world.router()
        await router.submit(1, prompt_of(1, 40), max_tokens=3000)
        await router.read_until(lambda: 1 in router.tokens)
        await router.write(cancel_slots=[1])
        await router.read_until(lambda: 1 in router.finishes)
        assert router.finishes[1].reason == FINISH_REASON_CANCELLED
        async with asyncio.timeout(10):
            await library.llm.outputs[-1].abort_called.wait()


async def test_the_librarys_death_fails_the_answers_and_ends_the_shard(library: FakeTensorRtLlm):
    """Routers then fail over, and the process exits."""
    async with world_of() as world:
        router = await world.router()
        await router.submit(1, prompt_of(1, 40), max_tokens=3000)
        await router.read_until(lambda: 1 in router.tokens)
        library.llm.die(RuntimeError("CUDA error"))
        await router.read_until(lambda: 1 in router.finishes)
        assert router.finishes[1].reason == FINISH_REASON_ERROR
        async with asyncio.timeout(20):
            await asyncio.wait({world.serving})
        assert "CUDA error" in str(world.serving.exception())
