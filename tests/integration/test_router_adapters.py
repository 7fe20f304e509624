"""Requests for adapters through a real router to real shards with the simulated engine, whose tokens show which adapter
computed them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from kvloom import Client, KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, SamplingParams
from kvloom.v1.router_service_pb2 import GenerateRequest, PlanRequest, TokenIds
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom.v1.shard_service_pb2 import LoadAdapterRequest, UnloadAdapterRequest
from kvloom.v1.shard_service_pb2_grpc import ShardServiceStub
from kvloom_common.config import ShardConfig, SimConfig
from kvloom_common.models.catalogue import adapters_of
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.sim_engine import SimEngine, expected_token_id
from shard_server.engines.sim_tokens import sim_adapter_checksum
from tests.fakes.failover_world import MODEL, FailoverWorld, failover_world
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

PROMPT = list(range(1000, 1080))
SEED = 7
SAMPLING = SamplingParams(temperature=1.0, seed=SEED)


@pytest.fixture
async def world(redis_url: str, tokenizer: ModelTokenizer) -> AsyncIterator[FailoverWorld]:
    """Two shards with the adapters law and poetry, and a third without any."""
    config = ShardConfig(block_size=16, num_blocks=512, sim=SimConfig(step_ms=2.0, adapter_load_ms=20.0))
    async with failover_world(redis_url, tokenizer) as started:
        for number in range(3):
            sim = SimEngine(MODEL, config, tokenizer.vocab_size, frozenset(), max_loaded_adapters=4)
            await started.add_shard(f"s{number}", sim, config)
        for shard_id in ("s0", "s1"):
            await load(started, shard_id, "law")
            await load(started, shard_id, "poetry")
        await started.start_router()
        await eventually(lambda: num_ready(started, "law") == num_ready(started, "poetry") == 2, "both adapters")
        yield started


def num_ready(world: FailoverWorld, adapter: str) -> int:
    return sum(
        one.num_ready_shards for model in world.link.fleet.models for one in model.adapters if one.name == adapter
    )


async def load(world: FailoverWorld, shard_id: str, name: str, path: str = "") -> None:
    async with grpc.aio.insecure_channel(world.members[shard_id].proxy.address) as channel:
        answer = await ShardServiceStub(channel).LoadAdapter(LoadAdapterRequest(name=name, path=path))
    assert not answer.HasField("error"), answer.error


async def unload(world: FailoverWorld, shard_id: str, name: str) -> None:
    async with grpc.aio.insecure_channel(world.members[shard_id].proxy.address) as channel:
        answer = await ShardServiceStub(channel).UnloadAdapter(UnloadAdapterRequest(name=name))
    assert not answer.HasField("error"), answer.error


def expected(adapter: str, num_tokens: int, path: str = "") -> tuple[int, ...]:
    checksum = sim_adapter_checksum(adapter, path) if adapter else ""
    return tuple(expected_token_id(PROMPT, SEED, position, checksum) for position in range(num_tokens))


async def answered(world: FailoverWorld, model: str, num_tokens: int = 20, **fields: Any) -> Sequence[Any]:
    return await world.begin(PROMPT, num_tokens, model=model, sampling=SAMPLING, **fields).ended()


async def test_each_request_runs_with_the_adapter_that_it_names(world: FailoverWorld) -> None:
    """Also when all have one prompt, which is cached for some of them: KV is never shared between adapters."""
    for _ in range(2):
        names = ["", "law", f"{MODEL}:poetry", f"{MODEL}:law", "poetry", ""]
        ends = await asyncio.gather(*(answered(world, name or MODEL) for name in names))
        for name, (end,) in zip(names, ends, strict=True):
            assert end.token_ids == expected(name.removeprefix(f"{MODEL}:"), 20)


async def test_an_answer_fails_over_to_a_shard_with_the_same_adapter(world: FailoverWorld) -> None:
    """It continues with the bits of the same adapter, though a shard without it is idle."""
    answer = world.begin(PROMPT, 200, model="law", sampling=SAMPLING)
    await answer.has_tokens(20)
    (start,) = answer.starts
    assert start is not None
    world.members[start.shard_id].proxy.reset()
    (end,) = await answer.ended()
    assert (end.reason, end.token_ids) == (FINISH_REASON_LENGTH, expected("law", 200))


async def test_an_adapter_goes_while_it_answers(world: FailoverWorld) -> None:
    """What runs ends as it began, and what is new is refused by name as soon as the adapter is gone."""
    answer = world.begin(PROMPT, 150, model="law", sampling=SAMPLING)
    await answer.has_tokens(1)
    await asyncio.gather(unload(world, "s0", "law"), unload(world, "s1", "law"))
    (end,) = await answer.ended()
    assert (end.reason, end.token_ids) == (FINISH_REASON_LENGTH, expected("law", 150))
    await eventually(lambda: not num_ready(world, "law"), "the adapter is gone")
    (refused,) = await answered(world, f"{MODEL}:law")
    assert refused.error_reason == ErrorReason.ERROR_REASON_MODEL_NOT_FOUND
    assert (await answered(world, "poetry"))[0].token_ids == expected("poetry", 20)


async def test_an_answer_does_not_continue_with_another_adapter_of_its_name(world: FailoverWorld) -> None:
    """Its client has seen the checksum with which it began."""
    before = adapters_of(world.link.fleet)[MODEL]["law"]
    assert before == sim_adapter_checksum("law", "")
    for shard_id in ("s0", "s1"):
        await unload(world, shard_id, "law")
        await load(world, shard_id, "law", "new")
    after = sim_adapter_checksum("law", "new")
    await eventually(lambda: adapters_of(world.link.fleet).get(MODEL, {}).get("law") == after, "the new adapter")
    (end,) = await answered(world, "law")
    assert end.token_ids == expected("law", 20, "new")
    (refused,) = await answered(world, "law", adapter_checksum=before)
    assert refused.error_reason == ErrorReason.ERROR_REASON_MODEL_NOT_FOUND


async def test_generate_plan_and_the_sdk_take_adapters(world: FailoverWorld) -> None:
    """Clients of gRPC name them as those of HTTP do, and learn what loading one would cost."""
    async with grpc.aio.insecure_channel(world.address) as channel:
        stub = RouterServiceStub(channel)
        request = GenerateRequest(model="law", token_ids=TokenIds(ids=PROMPT), sampling=SAMPLING)
        request.stop.max_tokens = 5
        plan = await stub.Plan(PlanRequest(request=request))
        assert plan.model == f"{MODEL}:law"
        shards = {shard.shard_id: shard for shard in plan.shards}
        assert "has no adapter law" in shards["s2"].filtered_reason
        assert shards["s0"].cost_terms["adapter"] > 0
        responses = [response async for response in stub.Generate(request)]
        assert responses[0].adapter_checksum == sim_adapter_checksum("law", "")
        tokens = [token for response in responses for delta in response.deltas for token in delta.token_ids]
        assert tuple(tokens) == expected("law", 5)
        loaded = (await stub.Plan(PlanRequest(request=request))).shards[0]
        assert (loaded.cost_terms["adapter"], loaded.num_overlap_tokens) == (0.0, len(PROMPT) - 1)
    async with Client(world.address) as client:
        given: Any = {"token_ids": PROMPT, "max_tokens": 5, "seed": SEED, "temperature": 1.0}
        answer = await client.complete(model=f"{MODEL}:poetry", **given)
        assert tuple(answer.choices[0].token_ids) == expected("poetry", 5)
        with pytest.raises(KvloomError, match="no adapter 'medicine'; it has law, poetry"):
            await client.complete(model=f"{MODEL}:medicine", **given)
