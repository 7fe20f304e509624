"""Reads the stream of usage records from Redis, as a member of a consumer group, and stores them.

An entry is removed from the stream once its records are committed; before that, routers are told how far theirs are
stored. Whatever fails is tried again, and nothing is stored twice. What a consumer has read and not removed, another
one takes over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

import redis.asyncio
import redis.exceptions
import sqlalchemy.exc
import structlog

from control.usage.ledger import forget_records, store
from control.usage.metrics import UsageMetrics
from kvloom_common.database.database import Database
from kvloom_common.process.cancellation import raise_if_cancelled
from kvloom_common.tenancy.usage_stream import GROUP, Stored, UsageEntry, UsageStream

log = structlog.get_logger()

MAX_ENTRIES: Final = 4
"""How many entries, of up to 256 records, are stored in one transaction. Leases of budgets wait for its end."""
BLOCK_MILLISECONDS: Final = 500
"""How long a read waits for entries: less than the client's time limit."""
CLAIM_SECONDS: Final = 5.0
CLAIM_AFTER_MILLISECONDS: Final = 10_000
"""An entry that another consumer has read so long ago is taken over: that one has died, or hangs."""
RETRY_SECONDS: Final = 1.0
FORGET_EVERY_SECONDS: Final = 3600.0

RawEntry = tuple[bytes, dict[bytes, bytes]]


class UsageConsumer:
    """`run` is its task. Consumers of one name may not run at the same time."""

    def __init__(
        self,
        database: Database,
        client: redis.asyncio.Redis,
        stream: UsageStream,
        name: str,
        metrics: UsageMetrics,
        alert_percents: Sequence[int] = (),
        keep_seconds: float = 0.0,
    ) -> None:
        """`keep_seconds`: records are deleted after that, and only their sums stay. 0: never."""
        self._database = database
        self._client = client
        self._stream = stream
        self._name = name
        self._metrics = metrics
        self._alert_percents = alert_percents
        self._keep_seconds = keep_seconds
        self._claim_at = 0.0
        self._forget_at = 0.0
        self._has_own_pending = True
        """True while entries may be pending that a process of this name has read and not stored."""
        self._failing_part = ""

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            try:
                await self.step()
                self._failing_part = ""
                continue
            except (redis.exceptions.RedisError, OSError) as error:
                self._note_failure("redis", error)
            except sqlalchemy.exc.SQLAlchemyError as error:
                self._note_failure("database", error)
            except Exception:  # a record that cannot be stored must not end metering for ever
                log.exception("usage_consumer_failed")
                self._metrics.failures.labels("consumer").inc()
            raise_if_cancelled()
            self._has_own_pending = True
            await asyncio.sleep(RETRY_SECONDS)

    async def step(self) -> int:
        """Read and store what there is, or wait a moment for it. Returns the number of entries. Raises RedisError,
        SQLAlchemyError."""
        await self._forget_old()
        entries = await self._read()
        if entries:
            await self._store(entries)
        return len(entries)

    async def _read(self) -> list[RawEntry]:
        try:
            if self._has_own_pending:
                entries = await self._read_group("0", block=None)
                self._has_own_pending = bool(entries)
                if entries:
                    return entries
            if time.monotonic() >= self._claim_at:
                self._claim_at = time.monotonic() + CLAIM_SECONDS
                claimed = await self._client.xautoclaim(
                    self._stream.stream, GROUP, self._name, CLAIM_AFTER_MILLISECONDS, count=MAX_ENTRIES
                )
                self._metrics.waiting.set(await self._client.xlen(self._stream.stream))
                if claimed[1]:
                    self._claim_at = 0.0
                    return claimed[1]
            return await self._read_group(">", block=BLOCK_MILLISECONDS)
        except redis.exceptions.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            # Redis is new, or has lost everything.
            await self._client.xgroup_create(self._stream.stream, GROUP, id="0", mkstream=True)
            return []

    async def _read_group(self, after: str, block: int | None) -> list[RawEntry]:
        found: Any = await self._client.xreadgroup(
            GROUP, self._name, {self._stream.stream: after}, count=MAX_ENTRIES, block=block
        )
        return found[0][1] if found else []

    async def _store(self, raw_entries: Sequence[RawEntry]) -> None:
        entries: list[UsageEntry] = []
        for _, fields in raw_entries:
            try:
                entries.append(self._stream.decoded(fields))
            except ValueError as error:
                self._metrics.unreadable.inc()
                log.warning("usage_entry_skipped", cause=str(error)[:200])
        stored: dict[str, Stored] = {}
        if entries:
            storing = store(self._database, entries, self._alert_percents, time.time())
            stored = await self._database.uninterrupted(storing)
        ids = [entry_id for entry_id, _ in raw_entries]
        pipeline = self._client.pipeline(transaction=True)
        for producer, known in stored.items():
            pipeline.hset(self._stream.stored, producer, self._stream.stored_value(producer, known))
        pipeline.xack(self._stream.stream, GROUP, *ids)
        pipeline.xdel(self._stream.stream, *ids)
        await pipeline.execute()
        self._metrics.stored.inc(sum(len(entry.records) for entry in entries))

    async def _forget_old(self) -> None:
        if not self._keep_seconds or time.monotonic() < self._forget_at:
            return
        self._forget_at = time.monotonic() + FORGET_EVERY_SECONDS
        forgetting = forget_records(self._database, time.time() - self._keep_seconds)
        count = await self._database.uninterrupted(forgetting)
        log.info("usage_records_deleted", num_records=count)

    def _note_failure(self, part: str, error: Exception) -> None:
        self._metrics.failures.labels(part).inc()
        if self._failing_part != part:
            log.warning("usage_store_failed", part=part, cause=type(error).__name__)
        self._failing_part = part
