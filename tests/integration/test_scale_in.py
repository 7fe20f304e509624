"""Half of a fleet's shards go while they serve (docs/operate/notices.md): a real router, and real shard servers with
the simulated engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, SamplingParams
from kvloom.v1.shard_service_pb2 import DrainRequest
from kvloom.v1.shard_service_pb2_grpc import ShardServiceStub
from kvloom_common.config import ShardConfig, SimConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.sim_engine import SimEngine
from tests.fakes.failover_world import MODEL, Collected, FailoverWorld, Member, failover_world
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

NUM_SHARDS = 8
NUM_STREAMS = 1000
MAX_TOKENS = 120
HELD_AT = 20
"""All streams have so many tokens when notice is given."""
NOTICE_SECONDS = 2.0
"""Less than the rest of the answers takes."""


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Iterator[ModelTokenizer]:
    loaded = ModelTokenizer.load(model_dir)
    yield loaded
    loaded.close()


def begin_all(world: FailoverWorld) -> list[Collected]:
    return [
        world.begin([number % 251, number // 251, 7], MAX_TOKENS, sampling=SamplingParams(temperature=1.0, seed=number))
        for number in range(NUM_STREAMS)
    ]


async def give_notice(leaving: Sequence[Member]) -> None:
    for member in leaving:
        async with grpc.aio.insecure_channel(member.proxy.address) as channel:
            await ShardServiceStub(channel).Drain(DrainRequest(draining=True, empty_within_seconds=NOTICE_SECONDS))


async def test_a_thousand_streams_lose_half_of_their_shards(router_redis_url: str, tokenizer: ModelTokenizer) -> None:
    """What an autoscaler does every evening: no stream may end by it, and none may differ by a byte."""
    async with failover_world(router_redis_url, tokenizer) as world:
        world.config.router.max_queued_requests = NUM_STREAMS
        await world.start_router()
        config = ShardConfig(engine="sim", max_batch=256, sim=SimConfig(step_ms=50.0, prefill_tokens_per_second=1e6))
        for number in range(NUM_SHARDS):
            await world.add_shard(f"shard-{number}", SimEngine(MODEL, config, tokenizer.vocab_size), config)
        await world.wait_for_shards(world.link, NUM_SHARDS)
        undisturbed = [await answer.ended() for answer in begin_all(world)]
        assert {choice.reason for choices in undisturbed for choice in choices} == {FINISH_REASON_LENGTH}

        world.hold(HELD_AT)
        streams = begin_all(world)
        for stream in streams:
            await stream.has_tokens(HELD_AT)
        members = list(world.members.values())
        leaving = members[: NUM_SHARDS // 2]
        num_there = sum(member.metric("vllm:num_requests_running") for member in leaving)
        assert num_there > NUM_STREAMS / 4
        await give_notice(leaving)
        world.hold(None)
        await eventually(
            lambda: not any(member.metric("vllm:num_requests_running") for member in leaving), "empty shards", 300.0
        )
        for member in leaving:
            await world._stop_member(member)
        assert [await stream.ended() for stream in streams] == undisturbed
        assert world.metric("kvloom_router_requests_moved_total", reason="notice") > 0
        assert await asyncio.wait_for(world.begin([1], 5, sampling=SamplingParams(seed=1)).ended(), 60.0)
