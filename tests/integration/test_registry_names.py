"""Names in the registry are unique: two machines that both call a shard "shard-0" must not overwrite each other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from kvloom_common.config import KvloomConfig
from kvloom_common.discovery import announcer as announcer_module
from kvloom_common.discovery.announcer import Announcer, announced_process, name_owner, process_record
from kvloom_common.discovery.records import NameTakenError, ProcessRecord, RouterRecord, ShardRecord, may_replace
from kvloom_common.discovery.registry import ProcessRegistry, RouterRegistry, ShardRegistry
from kvloom_common.trust.seal import PLAIN

FIRST = ShardRecord("shard-0", "a:1", "m", "incarnation-1", owner="east")
OTHER = ShardRecord("shard-0", "b:1", "m", "incarnation-2", owner="west")
SUCCESSOR = ShardRecord("shard-0", "a:2", "m", "incarnation-3", owner="east")


@contextlib.asynccontextmanager
async def registries(url: str, prefix: str) -> AsyncIterator[tuple[ShardRegistry, ShardRegistry]]:
    """Those of two processes."""
    one, two = ShardRegistry(url, prefix), ShardRegistry(url, prefix)
    try:
        yield one, two
    finally:
        await one.close()
        await two.close()


async def test_another_machine_does_not_overwrite_a_name(redis_url: str) -> None:
    """Routers would send the requests of one shard to the other, in turns, about once a second."""
    async with registries(redis_url, "names-1") as (one, two):
        await one.announce(FIRST)
        with pytest.raises(NameTakenError, match="a:1"):
            await two.announce(OTHER)
        await one.announce(FIRST)
        await two.withdraw(OTHER.key, OTHER.incarnation_id)
        assert await two.list_shards() == {"shard-0": FIRST}
        await one.withdraw(FIRST.key, FIRST.incarnation_id)
        await two.announce(OTHER)
        assert await one.list_shards() == {"shard-0": OTHER}


async def test_a_successor_takes_over_at_once(redis_url: str) -> None:
    """A shard that was killed leaves its announcement behind: its successor must not wait until that expires. The
    older one, if it still lives, gives way and leaves the record alone when it stops."""
    async with registries(redis_url, "names-2") as (one, two):
        await one.announce(FIRST)
        await two.announce(SUCCESSOR)
        with pytest.raises(NameTakenError):
            await one.announce(FIRST)
        await one.withdraw(FIRST.key, FIRST.incarnation_id)
        assert await one.list_shards() == {"shard-0": SUCCESSOR}


async def test_a_process_with_a_taken_name_does_not_start(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits as long as the announcement of a dead process lasts, and then says where the other one is."""
    monkeypatch.setattr(announcer_module, "TTL_SECONDS", 0.1)
    monkeypatch.setattr(announcer_module, "HEARTBEAT_SECONDS", 0.05)
    async with registries(redis_url, "names-3") as (one, two):
        await one.announce(FIRST)
        with pytest.raises(NameTakenError, match="names must be unique"):
            await Announcer(two, OTHER).wait_for_name()
        waiting = asyncio.create_task(Announcer(two, OTHER).wait_for_name())
        await one.withdraw(FIRST.key, FIRST.incarnation_id)
        await asyncio.wait_for(waiting, 5)


async def test_foreign_values_neither_stay_nor_stand_in_the_way(redis_url: str) -> None:
    """Anything may be written to a Redis that others use, too: a list under a shard's name once kept the shard out for
    good, and garbage without an expiry stayed until somebody deleted it."""
    async with registries(redis_url, "names-4") as (one, two), redis.asyncio.Redis.from_url(redis_url) as client:
        await client.rpush("names-4:shard:shard-0", "garbage")
        await client.set("names-4:shard:\udcff odd".encode("utf-8", "surrogateescape"), "garbage")
        await client.sadd("names-4:shard_ids", "shard-0", b"\xff odd", "shard-1")
        await client.set("names-4:shard:shard-1", "garbage")
        assert await two.list_shards() == {}
        assert 0 < await client.pttl("names-4:shard:shard-1") <= 5000
        await one.announce(FIRST)
        assert await two.list_shards() == {"shard-0": FIRST}


def test_who_may_replace_whom() -> None:
    """Records of earlier versions name no owner: they are replaced as before."""
    unnamed = ShardRecord("shard-0", "c:1", "m", "incarnation-4")
    assert may_replace(unnamed, FIRST, was_announced=False)
    assert may_replace(FIRST, unnamed, was_announced=False)
    assert may_replace(FIRST, FIRST, was_announced=True)
    assert not may_replace(FIRST, OTHER, was_announced=False)
    assert not may_replace(SUCCESSOR, FIRST, was_announced=True)


def test_owners_are_data_directories() -> None:
    """Two fabrics of one machine are two owners, and a path does not get into Redis."""
    assert name_owner("/a") == name_owner("/a") != name_owner("/b")
    assert "/a" not in name_owner("/a")


async def test_names_of_routers_and_other_processes_are_unique_too(redis_url: str) -> None:
    """`kvloom restart` and `kvloom logs` address every process of a fleet by its name. A router is found by its
    address, so two of one name would both be announced."""
    east = RouterRecord("a:1", "router", "incarnation-1", owner="east")
    routers = RouterRegistry(redis_url, "names-5"), RouterRegistry(redis_url, "names-5")
    edges = ProcessRegistry(redis_url, "names-5", "edge"), ProcessRegistry(redis_url, "names-5", "edge")
    try:
        await routers[0].announce(east)
        with pytest.raises(NameTakenError, match="router is the name of another process"):
            await routers[1].check_free(RouterRecord("b:1", "router", "incarnation-2", owner="west"))
        await routers[1].check_free(RouterRecord("a:2", "router", "incarnation-3", owner="east"))
        await edges[0].announce(ProcessRecord("edge", "a:3", "incarnation-4", "east"))
        with pytest.raises(NameTakenError, match="edge is the name of another process"):
            await edges[1].announce(ProcessRecord("edge", "b:3", "incarnation-5", "west"))
        await edges[1].announce(ProcessRecord("edge", "a:4", "incarnation-6", "east"))
        with pytest.raises(NameTakenError) as replaced:
            await edges[0].announce(ProcessRecord("edge", "a:3", "incarnation-4", "east"))
        assert replaced.value.is_successor
    finally:
        for registry in (*routers, *edges):
            await registry.close()


async def test_a_process_that_is_cancelled_leaves_the_registry(redis_url: str) -> None:
    """A machine that left by `kvloom down` was shown as unreachable for ten minutes: its supervisor, a task that is
    cancelled, could not withdraw itself any more, because no command of a cancelled task was sent."""
    config = KvloomConfig()
    config.redis.url, config.redis.key_prefix = redis_url, "left"
    registry = ProcessRegistry(redis_url, "left", "supervisor")
    announced = asyncio.Event()

    async def serve() -> None:
        async with announced_process(config, "supervisor", process_record(config, "kvloom", "127.0.0.1:1"), PLAIN):
            async for _ in registry.watch():
                if await registry.list_records():
                    announced.set()

    task = asyncio.create_task(serve())
    await announced.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await registry.list_records() == {}
    await registry.close()
