"""What a router relies on, whatever tells it where its shards are: the registry in Redis, or names that DNS knows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

import pytest

from kvloom_common.discovery import named_shards, registry
from kvloom_common.discovery.named_shards import NamedShards
from kvloom_common.discovery.records import ShardRecord
from kvloom_common.discovery.registry import ShardRegistry
from lab.free_ports import pick_free_ports
from router.links.fleet_watcher import ShardSource
from tests.fakes.fake_dns import FakeDns
from tests.fakes.fake_shard import FakeShard

pytest_plugins = ("tests.fakes.router_fixtures",)

MODEL = "tiny"
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


class Place(Protocol):
    """A source, and what makes it know of shards. All shards listen at one port, each at a host of its own."""

    @property
    def source(self) -> ShardSource: ...

    async def add(self, shard: FakeShard) -> None: ...

    async def remove(self, shard: FakeShard) -> None: ...


class RegistryPlace:
    def __init__(self, url: str, key_prefix: str) -> None:
        self.source = ShardRegistry(url, key_prefix)

    async def add(self, shard: FakeShard) -> None:
        info = shard.info
        await self.source.announce(ShardRecord(info.shard_id, shard.address, info.model, info.incarnation_id))

    async def remove(self, shard: FakeShard) -> None:
        await self.source.withdraw(shard.info.shard_id)


class NamesPlace:
    def __init__(self, port: int) -> None:
        self._dns = FakeDns()
        self.source = NamedShards([f"shards:{port}"], resolve=self._dns.resolve)

    async def add(self, shard: FakeShard) -> None:
        self._dns.addresses.setdefault("shards", []).append(shard.address.partition(":")[0])

    async def remove(self, shard: FakeShard) -> None:
        self._dns.addresses["shards"].remove(shard.address.partition(":")[0])


class Fleet:
    """Shards that start and stop."""

    def __init__(self, place: Place, port: int) -> None:
        self.source = place.source
        self._place = place
        self._port = port
        self._stack = contextlib.AsyncExitStack()

    async def start(self, shard_id: str, host: str, incarnation_id: str = "1") -> FakeShard:
        shard = FakeShard(shard_id, model=MODEL, incarnation_id=incarnation_id)
        await shard.start(self._port, host)
        self._stack.push_async_callback(shard.stop)
        await self._place.add(shard)
        return shard

    async def stop(self, shard: FakeShard) -> None:
        await shard.stop()
        await self._place.remove(shard)

    async def found(self) -> dict[str, tuple[str, str, str]]:
        """Host, model and incarnation by shard_id."""
        return {
            shard_id: (record.address.partition(":")[0], record.model, record.incarnation_id)
            for shard_id, record in (await self.source.list_shards()).items()
        }

    async def close(self) -> None:
        await self._stack.aclose()
        await self.source.close()


@pytest.fixture(params=["registry", "names"])
async def fleet(request: pytest.FixtureRequest, router_redis_url: str) -> AsyncIterator[Fleet]:
    [port] = pick_free_ports(1)
    place: Place = (
        RegistryPlace(router_redis_url, request.node.name) if request.param == "registry" else NamesPlace(port)
    )
    made = Fleet(place, port)
    try:
        yield made
    finally:
        await made.close()


async def test_shards_that_come_and_go_are_listed(fleet: Fleet) -> None:
    """A router places requests only on shards that it finds, and says which model each has."""
    assert await fleet.found() == {}
    first = await fleet.start("shard-0", HOSTS[0])
    await fleet.start("shard-1", HOSTS[1])
    assert await fleet.found() == {"shard-0": (HOSTS[0], MODEL, "1"), "shard-1": (HOSTS[1], MODEL, "1")}
    await fleet.stop(first)
    assert await fleet.found() == {"shard-1": (HOSTS[1], MODEL, "1")}


async def test_a_restarted_shard_has_its_new_incarnation(fleet: Fleet) -> None:
    """A link accepts only the incarnation that it was told of: with the former one it would never connect again."""
    shard = await fleet.start("shard-0", HOSTS[0])
    assert await fleet.found() == {"shard-0": (HOSTS[0], MODEL, "1")}
    await fleet.stop(shard)
    again = await fleet.start("shard-0", HOSTS[0], "2")
    assert await fleet.found() == {"shard-0": (HOSTS[0], MODEL, "2")}
    await fleet.stop(again)
    await fleet.start("shard-0", HOSTS[2], "3")  # as a pod with another address
    assert await fleet.found() == {"shard-0": (HOSTS[2], MODEL, "3")}


async def test_watchers_read_at_once_and_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router serves as soon as it has read once, and needs no change to read again."""
    for module in (registry, named_shards):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    num_reads = 0
    async with asyncio.timeout(30):
        async for _ in fleet.source.watch():
            num_reads += 1
            if num_reads == 2:
                break
    assert num_reads == 2
