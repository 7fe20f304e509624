"""The registry in Redis: shards announce themselves to routers, routers to edges, safety services to routers, and all
of them, like the supervisors of `kvloom up`, to those who operate the fleet. Supervisors also announce rollouts of new
versions of models, to routers and edges.

There is one key per process (`<prefix>:shard:<shard_id>`, `<prefix>:router:<address>`,
`<prefix>:process-<role>:<name>`, JSON) that expires unless it is announced again, one set per kind with the ids, and a
channel (`<prefix>:shards`, `<prefix>:routers` ...) that wakes the watchers when a process starts, stops, or replaces
another one. No process drops an established connection because Redis is unreachable: the connection is the truth, and
the registry only says where to connect.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Container, Sequence
from typing import Any, Final, Generic

import msgspec
import redis.asyncio.retry
import redis.backoff
import redis.exceptions
import structlog

from kvloom_common.discovery.records import (
    MetricsTarget,
    NameTakenError,
    ProcessRecord,
    ProcessRole,
    Record,
    RecordError,
    RolloutRecord,
    RouterRecord,
    ShardRecord,
    have_one_owner,
    may_replace,
    read_record,
)
from kvloom_common.discovery.redis_client import redis_client
from kvloom_common.process.aligned_timer import seconds_to_aligned_tick
from kvloom_common.trust.seal import PLAIN, Sealer

log = structlog.get_logger()

HEARTBEAT_SECONDS: Final = 1.0
TTL_SECONDS: Final = 5.0
SUPERVISOR_TTL_SECONDS: Final = 600.0
"""How long `kvloom status` shows that a machine is missing which was not stopped by `kvloom down`."""
POLL_SECONDS: Final = 2.0
"""Changes are published at once; polling finds what has expired, or was missed."""


class Registry(Generic[Record]):
    """The announced processes of one kind. All methods raise redis.exceptions.RedisError when the server cannot be
    reached."""

    def __init__(
        self,
        url: str,
        key_prefix: str,
        kind: str,
        record_type: type[Record],
        sealer: Sealer | None = None,
        ttl_seconds: float | None = None,
    ) -> None:
        """With `sealer` the records are signed, and those that this fabric has not signed are left out. `ttl_seconds`:
        how long a record outlives its process; None: TTL_SECONDS."""
        # Callers retry by themselves with every heartbeat. The client's own retries would only hide the outage.
        retry = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)
        self._redis = redis_client(url, timeout_seconds=2.0, retry=retry)
        self._prefix = f"{key_prefix}:{kind}"
        self._record_type: type[Record] = record_type
        self._sealer: Sealer = sealer or PLAIN
        self._ttl_seconds = ttl_seconds or TTL_SECONDS
        self._last_keys: list[str] = []
        self._ignored: dict[str, bytes] = {}
        """By key: values that were reported as unusable."""
        self._announced: dict[str, str] = {}
        """The incarnations that this registry has announced last, by key."""

    async def announce(self, record: Record) -> None:
        """Announce a process for the next `ttl_seconds`. Raises NameTakenError if another one has its name, and
        WatchError, which is a RedisError, if the record changes at this moment."""
        name = self._name(record.key)
        announcement = self._sealer.sign(name, msgspec.json.encode(record))
        async with self._redis.pipeline(transaction=True) as pipe:
            await pipe.watch(name)
            before = await _value(pipe, name)
            if before is not None and before != announcement:
                self._check_replaceable(record, before)
            pipe.multi()
            pipe.set(name, announcement, px=round(self._ttl_seconds * 1000))
            pipe.sadd(self._ids_name, record.key)
            if before != announcement:
                pipe.publish(self._channel, record.key)
            await pipe.execute()
        self._announced[record.key] = record.incarnation_id

    async def check_free(self, record: Record) -> None:
        """Raises NameTakenError if another process has the name of this one."""
        before = await _value(self._redis, self._name(record.key))
        if before is not None:
            self._check_replaceable(record, before)

    def _check_replaceable(self, record: Record, before: bytes) -> None:
        holder = self._decoded(record.key, before)
        if holder is None:
            return  # garbage, or another fabric's, which is reported
        was_announced = self._announced.get(record.key) == record.incarnation_id
        if not may_replace(holder, record, was_announced=was_announced):
            is_successor = was_announced and have_one_owner(holder, record)
            raise NameTakenError(record.name, holder, is_successor=is_successor)

    async def withdraw(self, key: str, incarnation_id: str = "") -> None:
        """Remove a process, which has stopped. With `incarnation_id`, a process of the same name that has replaced it
        stays."""
        name = self._name(key)
        async with self._redis.pipeline(transaction=True) as pipe:
            if incarnation_id:
                await pipe.watch(name)
                before = await _value(pipe, name)
                holder = self._decoded(key, before) if before is not None else None
                if holder is not None and holder.incarnation_id != incarnation_id:
                    return
                pipe.multi()
            pipe.delete(name)
            pipe.srem(self._ids_name, key)
            pipe.publish(self._channel, key)
            await pipe.execute()

    async def list_records(self) -> dict[str, Record]:
        """The processes whose announcement has not expired, by key."""
        keys, values = await self._read(self._last_keys)
        if keys != self._last_keys:
            self._last_keys = keys
            _, values = await self._read(keys)
        found: dict[str, Record] = {}
        before = self._ignored.copy()
        expired: list[str] = []
        for key, value in zip(keys, values, strict=True):
            if value is None:
                expired.append(key)
            elif (record := self._decoded(key, value)) is not None:
                found[key] = record
            elif value != before.get(key):
                # What no process announces again disappears, like the announcement of a dead process.
                await self._redis.pexpire(self._name(key), round(TTL_SECONDS * 1000))
        self._ignored = {key: value for key, value in self._ignored.items() if key in keys}
        if expired:
            await self._redis.srem(self._ids_name, *expired)
        return found

    def _decoded(self, key: str, value: bytes) -> Record | None:
        """None for a record that cannot be used, which is reported once."""
        if self._ignored.get(key) == value:
            return None
        try:
            return read_record(self._sealer, self._name(key), key, value, self._record_type)
        except RecordError as error:
            self._ignored[key] = value
            log.warning("registry_record_ignored", key=self._name(key), cause=str(error)[:200])
            return None

    async def _read(self, keys: Sequence[str]) -> tuple[list[str], list[bytes | None]]:
        """All keys, sorted, and the records of `keys`. They are read in one round trip, since the keys have mostly not
        changed since the last time."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.smembers(self._ids_name)
            if keys:
                pipe.mget([self._name(key) for key in keys])
            try:
                members, *values = await pipe.execute()
            except redis.exceptions.ResponseError as error:
                if "WRONGTYPE" in str(error):  # foreign; no process could be found or announced beside it
                    log.warning("registry_value_deleted", key=self._ids_name)
                    await self._redis.delete(self._ids_name)
                raise
        # No process has a name that is not UTF-8, so such a member is foreign.
        names = [member.decode() for member in members if _is_text(member)]
        return sorted(names), values[0] if values else []

    async def watch(self) -> AsyncIterator[None]:
        """Yields whenever the records should be read again: at once after a change, otherwise every POLL_SECONDS.
        Raises RedisError when the server becomes unreachable."""
        async with self._redis.pubsub() as pubsub:
            await pubsub.subscribe(self._channel)
            while True:
                yield
                await pubsub.get_message(
                    ignore_subscribe_messages=True, timeout=seconds_to_aligned_tick(time.monotonic(), POLL_SECONDS)
                )

    @property
    def num_ignored(self) -> int:
        """How many records the latest list left out because this fabric has not signed them, or they are malformed."""
        return len(self._ignored)

    async def close(self) -> None:
        await self._redis.aclose()

    @property
    def _ids_name(self) -> str:
        return f"{self._prefix}_ids"

    @property
    def _channel(self) -> str:
        return f"{self._prefix}s"

    def _name(self, key: str) -> str:
        return f"{self._prefix}:{key}"


def _is_text(member: bytes) -> bool:
    try:
        member.decode()
    except UnicodeDecodeError:
        return False
    return True


async def _value(client: Any, name: str) -> bytes | None:
    """The value of a key; b"", which is no record, if the key holds something else."""
    try:
        return await client.get(name)
    except redis.exceptions.ResponseError as error:
        if "WRONGTYPE" in str(error):
            return b""
        raise


def records_of(key_prefix: str, role: str, name: str) -> list[str]:
    """Where the records of a shard, or of another process that has a name, are stored; see ServiceIdentity."""
    return [f"{key_prefix}:{'shard' if role == 'shard' else f'process-{role}'}:{name}"]


class ShardRegistry(Registry[ShardRecord]):
    """The announced shards."""

    def __init__(self, url: str, key_prefix: str, sealer: Sealer | None = None) -> None:
        super().__init__(url, key_prefix, "shard", ShardRecord, sealer)

    async def list_shards(self, connected: Container[str] = ()) -> dict[str, ShardRecord]:  # noqa: ARG002
        """By shard_id. `connected` is for sources that ask the shards themselves."""
        return await self.list_records()


class RouterRegistry(Registry[RouterRecord]):
    """The announced routers."""

    def __init__(self, url: str, key_prefix: str, sealer: Sealer | None = None) -> None:
        super().__init__(url, key_prefix, "router", RouterRecord, sealer)

    async def list_routers(self) -> dict[str, RouterRecord]:
        """By address."""
        return await self.list_records()

    async def check_free(self, record: RouterRecord) -> None:
        """Raises NameTakenError if a router of another owner has this one's name. Routers find one another by their
        addresses; names are for people and tools."""
        for holder in (await self.list_routers()).values():
            if holder.router_id == record.router_id and holder.owner and holder.owner != record.owner:
                raise NameTakenError(record.router_id, holder)


class MetricsRegistry(Registry[MetricsTarget]):
    """The announced processes that serve /metrics."""

    def __init__(self, url: str, key_prefix: str, sealer: Sealer | None = None) -> None:
        super().__init__(url, key_prefix, "metrics", MetricsTarget, sealer)

    async def list_targets(self) -> list[MetricsTarget]:
        """Sorted by role and name."""
        found = await self.list_records()
        return sorted(found.values(), key=lambda target: (target.role, target.name, target.address))


class RolloutRegistry(Registry[RolloutRecord]):
    """The rollouts of new versions of models, by the name of the model."""

    def __init__(self, url: str, key_prefix: str, sealer: Sealer | None = None) -> None:
        super().__init__(url, key_prefix, "rollout", RolloutRecord, sealer)


class ProcessRegistry(Registry[ProcessRecord]):
    """The announced edges, safety or control services, or supervisors, by name."""

    def __init__(
        self,
        url: str,
        key_prefix: str,
        role: ProcessRole,
        sealer: Sealer | None = None,
    ) -> None:
        ttl_seconds = SUPERVISOR_TTL_SECONDS if role == "supervisor" else None
        super().__init__(url, key_prefix, f"process-{role}", ProcessRecord, sealer, ttl_seconds)
