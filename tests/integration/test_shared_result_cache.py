"""Answers that routers share through a real Redis server."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvloom_common.trust.sealing import SecretSealer
from kvloom_common.trust.secret import FabricSecret
from router.features.result_cache.shared import SharedResultCache
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

SECRET = FabricSecret.draw()


async def found(cache: SharedResultCache, key: bytes, tenant: str) -> bytes | None:
    future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
    cache.look_up(key, tenant, future.set_result)
    async with asyncio.timeout(5):
        return await future


@pytest.fixture
async def caches(router_redis_url: str) -> AsyncIterator[list[SharedResultCache]]:
    """Those of two routers of a fabric, and of one of another fabric."""
    prefix = f"shared-{uuid.uuid4().hex}"
    sealers = SecretSealer(SECRET), SecretSealer(SECRET), SecretSealer(FabricSecret.draw())
    made = [SharedResultCache(router_redis_url, prefix, sealer, timeout_seconds=1.0) for sealer in sealers]
    writing = [asyncio.create_task(cache.watch()) for cache in made]
    yield made
    for task in writing:
        task.cancel()
    await asyncio.gather(*writing, return_exceptions=True)
    for cache in made:
        await cache.close()


async def test_routers_of_one_fabric_read_one_anothers_answers(caches: list[SharedResultCache]) -> None:
    """And nobody else who can read Redis, which has no plain answer."""
    first, second, stranger = caches
    first.store(b"k", b"an answer", "a/b", 60.0)
    await eventually(lambda: not first._writes, "the write has begun")
    for _ in range(100):
        if await found(second, b"k", "a/b") == b"an answer":
            break
    else:
        raise AssertionError("the other router did not find it")
    assert await found(second, b"k", "a/c") is None
    assert await found(stranger, b"k", "a/b") is None
    names: list[Any] = [name async for name in first._redis.scan_iter(match=f"{first._prefix}:*")]
    kept: list[Any] = [await first._redis.get(name) for name in names]
    assert [b"an answer" in value for value in kept] == [False]


async def test_clearing_one_tenant(caches: list[SharedResultCache]) -> None:
    """The others' answers stay."""
    first, second, _ = caches
    for tenant in ("a/b", "a/c"):
        first.store(b"k", b"x", tenant, 60.0)
    for tenant in ("a/b", "a/c"):
        while await found(second, b"k", tenant) is None:
            pass
    await second.clear({"a/b"})
    assert [await found(first, b"k", tenant) for tenant in ("a/b", "a/c")] == [None, b"x"]


async def test_without_redis_requests_do_not_wait(unused_tcp_port: int) -> None:
    """The first one finds out, within its time limit, and the next ones do not ask."""
    cache = SharedResultCache(f"redis://127.0.0.1:{unused_tcp_port}", "p", SecretSealer(SECRET), 0.05)
    assert cache.is_asked
    assert await found(cache, b"k", "a/b") is None
    assert not cache.is_asked
    await cache.close()
