"""Usage records of a router with tenants, and what the edge tells callers of them: over an edge, a router and the
shards of two models."""

from __future__ import annotations

import asyncio
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from kvloom_common.config import (
    RedisConfig,
    ShadowConfig,
)
from kvloom_common.parsers.spec import ParserSpec
from tests.fakes.edge_peers import die, join
from tests.fakes.edge_world import EdgeWorld
from tests.fakes.metered_world import BODIES, TENANT, metered
from tests.fakes.two_models_world import FIRST, SECOND
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)


def reasoning_in(answer: Any) -> int:
    """What a body, or the last event of a stream that has usage, says."""
    events = answer if isinstance(answer, list) else [answer]
    usage = next(found for event in reversed(events) if (found := event.get("response", event).get("usage")))
    if "completion_tokens_details" in usage:
        return usage["completion_tokens_details"]["reasoning_tokens"]
    details = usage["output_tokens_details"]
    return details.get("reasoning_tokens", details.get("thinking_tokens"))


@pytest.mark.parametrize("path", BODIES)
async def test_bodies_say_as_much_reasoning_as_records(router_redis_url: str, tmp_path: Path, path: str) -> None:
    """Records had no tokens of reasoning at all, since only edges parse answers; and an edge that gets several tokens
    in one update cannot count them exactly."""
    text = "<think>the quick fox jumps</think>over the lazy dog"
    async with metered(router_redis_url, tmp_path, text, ParserSpec(reasoning="qwen3")) as world:
        more: dict[str, Any] = {"stream_options": {"include_usage": True}} if path == "/v1/chat/completions" else {}
        said = [
            reasoning_in((await world.ask(path, stream=stream, **(more if stream else {})))[0])
            for stream in (False, True)
        ]
        records = await world.records()
        assert said == [record.num_reasoning_tokens for record in records]
        assert 0 < said[0] < records[0].num_output_tokens


async def test_a_failover_changes_neither_reasoning_nor_cost(router_redis_url: str, tmp_path: Path) -> None:
    """Choices that end in different ways are added up, and an answer that two models have written costs what both
    records say: it had the first one's price."""
    async with metered(router_redis_url, tmp_path, "the quick fox jumps over ") as world:
        world.models.lose_first_after(7)
        events, _ = await world.ask(model="chat", stream=True, headers={"x-kvloom-details": "true"})
        records = await world.records()
        assert {record.model: record.num_output_tokens for record in records} == {FIRST: 7, SECOND: 53}
        details = next(event["kvloom"] for event in reversed(events) if "kvloom" in event)
        assert details["continued_by"] == SECOND
        assert Decimal(details["cost"]) * 10**9 == sum(record.cost_nanos for record in records)
        assert {record.tenant for record in records} == {TENANT}


async def test_what_a_cascade_discards_is_metered_apart(router_redis_url: str, tmp_path: Path) -> None:
    """Callers paid for candidates that they were never shown."""
    async with metered(router_redis_url, tmp_path, "I'm sorry, but I can't help with that. ") as world:
        _, headers = await world.ask(model="cheap")
        await world.until_recorded(3)  # a record, its correction, and that of the answer
        found = {record.tenant: record for record in await world.counted()}
        assert set(found) == {TENANT, f"discarded:{TENANT}"}
        assert found[TENANT].model == SECOND
        assert Decimal(headers["x-kvloom-cost"]) * 10**9 == found[TENANT].cost_nanos
        assert (found[f"discarded:{TENANT}"].model, found[f"discarded:{TENANT}"].cost_nanos) == (FIRST, 0)
        assert found[f"discarded:{TENANT}"].num_output_tokens == 60


async def test_shadow_traffic_is_metered_apart(router_redis_url: str, tmp_path: Path) -> None:
    """It used engines, and no record showed for whom."""
    shadow = ShadowConfig(model=FIRST, candidate=SECOND, share=1.0, mode="generate")
    async with metered(router_redis_url, tmp_path, "the quick fox ", shadows=[shadow]) as world:
        await world.ask()
        await world.until_recorded(2)
        own, other = sorted(await world.counted(), key=lambda record: record.tenant)
        assert (own.tenant, own.model, own.tier) == (TENANT, FIRST, "interactive")
        assert (other.tenant, other.model, other.tier) == (f"shadow:{TENANT}", SECOND, "shadow")
        assert own.cost_nanos > other.cost_nanos == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeated_request_is_metered_once(router_redis_url: str, tmp_path: Path, stream: bool) -> None:
    """Also if it is repeated while the first one runs."""
    async with metered(router_redis_url, tmp_path, "the quick fox ") as world:
        key: dict[str, Any] = {"headers": {"Idempotency-Key": "k"}}
        running = asyncio.create_task(world.ask(stream=stream, **key))
        await eventually(lambda: world.models.server._core.progress(math.inf, 0.0), "the request")
        meanwhile, _ = await world.ask(stream=stream, **key)
        await asyncio.gather(running, return_exceptions=True)  # of a stream, the later connection gets the rest
        later, _ = await world.ask(stream=stream, **key)
        assert meanwhile == later
        [record] = await world.records()
        assert record.num_output_tokens == 60


async def test_a_repeated_request_is_metered_once_after_its_edge_has_died(
    router_redis_url: str, tmp_path: Path
) -> None:
    """Another edge finds the answer, continues it at the router, and the records of both count as one."""
    redis = RedisConfig(url=router_redis_url, key_prefix=f"truth-{tmp_path.name}")
    async with metered(router_redis_url, tmp_path, "the quick fox ") as world, world.edge("edge-b") as other:
        peers = join(other, redis)
        key = {"stream": True, "max_tokens": 400, "headers": {"Idempotency-Key": "k"}}
        async with world.edge("edge-c") as dying:
            dying_peers = join(dying, redis)
            asking = asyncio.create_task(world.ask(url=dying.url, **key))
            await eventually(lambda: _num_events(dying) > 20, "some tokens")
            await dying_peers._publisher.flush()
            await die(dying, dying_peers)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        events, _ = await world.ask(url=other.url, **key)
        again, _ = await world.ask(url=other.url, **key)
        assert events == again
        records = await world.counted()
        assert [record.num_output_tokens for record in records] == [400]
        assert records[0].num_prompt_tokens > 0
        await peers.close()
        await dying_peers.close()


def _num_events(world: EdgeWorld) -> int:
    return sum(stream.log.num_events for stream in world.edge.resume.streams.values())
