"""Usage records from a router to the database: real files, a real Redis server, real databases."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio
import redis.asyncio.retry
import redis.backoff
from prometheus_client import CollectorRegistry

from control.usage.consumer import UsageConsumer
from control.usage.leases import change_leases
from control.usage.ledger import forget_records
from control.usage.metrics import UsageMetrics
from kvloom.v1.control_service_pb2 import BUDGET_UNIT_NANOS, BudgetChange, BudgetName
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, FINISH_REASON_STOP
from kvloom_common.config import ControlConfig, KvloomConfig, RedisConfig
from kvloom_common.database.database import Database
from kvloom_common.discovery.redis_client import redis_client
from kvloom_common.tenancy.prices import Price, Prices
from kvloom_common.tenancy.usage_stream import UsageStream
from kvloom_common.trust.seal import PLAIN, Sealer
from kvloom_common.trust.sealing import SecretSealer
from kvloom_common.trust.secret import FabricSecret
from router.core.actions import RequestEnded
from router.core.events import TierRank
from router.core.request_usage import RequestUsage
from router.metering.metering import Metering
from router.metering.spool import Spool
from tests.fakes.redis_server import ForgetfulRedis
from tests.fakes.usage import totals, usage_database
from tests.waiting import eventually

PRICES = Prices([Price("p1", "*", prompt_nanos=1, output_nanos=3)])


def ended(request_id: str, num_output: int = 5, *, num_resumed: int = 0, answer_id: str = "") -> RequestEnded:
    usage = RequestUsage(TierRank.INTERACTIVE, None, "k1", answer_id, num_resumed, 0.5)
    return RequestEnded(
        request_id, "acme/search", "m", "s0", 1, FINISH_REASON_STOP, 0, 10, 0, num_output, 0.0, 0.1, 0.2, usage=usage
    )


class World:
    """One data directory, one Redis, one database; routers and consumers come and go."""

    def __init__(self, folder: Path, server: ForgetfulRedis, database: Database) -> None:
        self.folder = folder
        self.server = server
        self.database = database
        self.running: list[RequestEnded] = []
        self.sealer: Sealer = PLAIN
        self.config = KvloomConfig(
            data_dir=str(folder), control=ControlConfig(enabled=True), redis=RedisConfig(url=server.url)
        )

    @contextlib.asynccontextmanager
    async def router(self, incarnation: str, *, killed: bool = False) -> AsyncIterator[Metering]:
        """`killed`: it ends as a process that is killed does: nothing more is written, and its lock is free."""
        registry = CollectorRegistry()
        metering = Metering(
            self.config, "r0", incarnation, self.sealer, lambda: PRICES, lambda _: list(self.running), registry,
            retry_seconds=0.1, scan_seconds=0.1,
        )  # fmt: skip
        await metering.start()
        task = asyncio.create_task(metering.run())
        try:
            yield metering
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if killed:
                metering._thread.shutdown()
                metering._spool.close()
            else:
                await metering.close()

    @contextlib.asynccontextmanager
    async def consumer(self) -> AsyncIterator[None]:
        retry = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)
        client = redis_client(self.server.url, timeout_seconds=2.0, retry=retry)
        stream = UsageStream(self.config.redis.key_prefix, self.sealer)
        task = asyncio.create_task(
            UsageConsumer(self.database, client, stream, "control", UsageMetrics(CollectorRegistry())).run()
        )
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.aclose()

    async def until(self, num_requests: int, num_output_tokens: int | None = None) -> None:
        await eventually(lambda: self._has(num_requests, num_output_tokens))

    async def _has(self, num_requests: int, num_output_tokens: int | None) -> bool:
        found = await totals(self.database)
        wanted = found["num_output_tokens"] if num_output_tokens is None else num_output_tokens
        return (found["num_requests"], found["num_output_tokens"]) == (num_requests, wanted)


@pytest.fixture
async def world(tmp_path: Path, database_below_url: str) -> AsyncIterator[World]:
    server = ForgetfulRedis()
    server.start()
    try:
        async with usage_database(database_below_url, monthly_budget_nanos=10_000) as database:
            yield World(tmp_path / "data", server, database)
    finally:
        server.kill()


async def test_records_arrive_once_with_their_cost(world: World) -> None:
    """The whole way of a record, as in a fabric where nothing fails."""
    async with world.consumer(), world.router("1") as metering:
        for number in range(20):
            metering.request_ended(ended(f"q{number}"))
        await world.until(20, 100)
        assert (await totals(world.database))["cost_nanos"] == 20 * (10 + 15)
        refused = msgspec.structs.replace(
            ended("refused"), num_attempts=0, is_admitted=False, reason=FINISH_REASON_ERROR
        )
        assert metering.request_ended(refused) == b""


async def test_nothing_is_lost_while_redis_and_control_are_away(world: World) -> None:
    """Serving goes on without both, and so does metering."""
    world.server.kill()
    async with world.router("1") as metering:
        for number in range(10):
            metering.request_ended(ended(f"a{number}"))
        world.server.start()
        for number in range(10):
            metering.request_ended(ended(f"b{number}"))
        async with world.consumer():
            await world.until(20)


async def test_what_redis_has_lost_is_sent_again(world: World) -> None:
    """Redis keeps the stream in memory: killed, it forgets entries that it had acknowledged."""
    async with world.router("1") as metering:
        for number in range(10):
            metering.request_ended(ended(f"a{number}"))
        client = redis.asyncio.Redis.from_url(world.server.url)
        stream = UsageStream("kvloom", PLAIN).stream
        await eventually(lambda: client.xlen(stream))
        await client.aclose()
        world.server.kill()
        world.server.start()
        async with world.consumer():
            await world.until(10)


async def test_a_killed_router_s_records_are_finished_by_its_successor(world: World) -> None:
    """Neither ended nor running requests may be lost with a router, and its lease must come free."""
    month = BudgetName(account="tenant:acme/search", unit=BUDGET_UNIT_NANOS)
    month.period = "2999-01"
    await change_leases(world.database, "r0/1", [BudgetChange(budget=month, wanted=10_000, number=1)])
    world.server.kill()  # so that nothing is forwarded
    async with world.router("1", killed=True) as metering:
        metering.request_ended(ended("done"))
        world.running = [ended("running", 3), ended("continued", 4)]
        progress = world.folder / "usage" / "r0" / "1" / "progress"
        await eventually(lambda: progress.exists() and progress.stat().st_size > 100)
    world.running = []
    world.server.start()
    async with world.consumer(), world.router("2") as metering:
        metering.request_ended(ended("continued", 6, num_resumed=5))
        await world.until(3, 5 + 3 + 11)
        await eventually(lambda: not (world.folder / "usage" / "r0" / "1").exists())
        [grant] = await change_leases(world.database, "r0/2", [BudgetChange(budget=month, wanted=10_000, number=1)])
        assert grant.granted == 10_000


async def test_a_full_disk_stops_neither_serving_nor_metering(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spending must never make a request fail; records that cannot be written are forwarded from memory."""
    append = Spool.append

    def is_full(_spool: Spool, _records: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Spool, "append", is_full)
    async with world.consumer(), world.router("1") as metering:
        for number in range(10):
            metering.request_ended(ended(f"a{number}"))
        await world.until(10)
        metering.request_ended(ended("b"))
        monkeypatch.setattr(Spool, "append", append)
        metering.request_ended(ended("c"))
        await world.until(12)


async def test_tokens_that_were_lost_in_transit_are_taken_out(world: World) -> None:
    """The next router delivers, and meters, them (docs/adr/0011)."""
    async with world.consumer(), world.router("1") as metering:
        record = metering.request_ended(ended("a", 9))
        await world.until(1, 9)
        metering.tokens_lost(record, 2)
        await world.until(1, 7)
        assert (await totals(world.database))["cost_nanos"] == 10 + 21


@contextlib.asynccontextmanager
async def writer_to(world: World) -> AsyncIterator[redis.asyncio.Redis]:
    """An attacker who can write to Redis, and no more."""
    async with redis.asyncio.Redis.from_url(world.server.url) as client:
        yield client


async def test_records_that_the_fabric_has_not_signed_are_not_billed(world: World) -> None:
    """An attacker who can write to Redis could bill a tenant for what it never had, or use up its budget."""
    world.sealer = SecretSealer(FabricSecret.draw())
    async with world.consumer(), world.router("1") as metering, writer_to(world) as client:
        metering.request_ended(ended("true"))
        await world.until(1, 5)
        for sealer in (PLAIN, SecretSealer(FabricSecret.draw())):
            stream = UsageStream("kvloom", sealer)
            record = msgspec.json.encode({"producer": "r0/1", "number": 2, "request_id": "forged"})
            await client.xadd(stream.stream, stream.entry("r0/1", [record]))
            await client.xadd(stream.stream, stream.entry("r0/1", [], closed_after=0))
        # A signed value of another key of the registry, in the stream.
        await client.xadd(stream.stream, {b"entry": world.sealer.sign("kvloom:shard:a", record)})
        await eventually(lambda: _is_empty(client, stream.stream))
        metering.request_ended(ended("after"))
        await world.until(2, 10)


async def test_signed_entries_that_are_sent_again_are_not_billed_again(world: World) -> None:
    """Who has recorded what a router wrote could add it to the stream as often as wanted, also much later."""
    world.sealer = SecretSealer(FabricSecret.draw())
    stream = UsageStream("kvloom", world.sealer)
    recorded: list[Any] = []
    async with writer_to(world) as client:
        async with world.router("1") as metering:
            metering.request_ended(ended("once"))
            await eventually(lambda: client.xlen(stream.stream))
            found: Any = await client.xrange(stream.stream)
            recorded += [fields for _, fields in found]
        async with world.consumer():
            await world.until(1, 5)
            await forget_records(world.database, before=float("inf"))
            for fields in recorded * 3:
                await client.xadd(stream.stream, fields)
            await eventually(lambda: _is_empty(client, stream.stream))
            await world.until(1, 5)


async def test_what_control_says_of_one_router_is_not_believed_of_another(world: World) -> None:
    """A copied value would tell a router that all is stored, and what it has would never be billed."""
    world.sealer = SecretSealer(FabricSecret.draw())
    stream = UsageStream("kvloom", world.sealer)
    async with writer_to(world) as client:
        async with world.consumer(), world.router("1") as metering:
            for number in range(20):
                metering.request_ended(ended(f"a{number}"))
            await world.until(20, 100)
            await eventually(lambda: client.hget(stream.stored, "r0/1"))
        value = await client.hget(stream.stored, "r0/1")
        assert stream.read_stored("r0/1", value).number >= 20
        await client.hset(stream.stored, "r0/2", value)
        async with world.router("2") as metering:
            for number in range(5):
                metering.request_ended(ended(f"b{number}"))
            async with world.consumer():
                await world.until(25, 125)


async def _is_empty(client: redis.asyncio.Redis, stream: str) -> bool:
    return not await client.xlen(stream)
