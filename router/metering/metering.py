"""All of a router's metering: nothing here makes a request wait, or fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import redis.asyncio.retry
import redis.backoff
import redis.exceptions
import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.redis_client import redis_client
from kvloom_common.tenancy.prices import Prices
from kvloom_common.tenancy.usage_stream import UsageStream
from kvloom_common.trust.seal import Sealer
from router.core.actions import RequestEnded
from router.core.request_end import RequestEnd
from router.metering.forwarder import RETRY_SECONDS, Forwarder
from router.metering.meter import Meter
from router.metering.orphans import SCAN_SECONDS, Orphans
from router.metering.spool import Numbered, Spool
from router.metering.writer import MeteringMetrics, RecordWriter

log = structlog.get_logger()

T = TypeVar("T")

CHECKPOINT_SECONDS: Final = 0.5
"""A checkpoint has the progress as of the one before, because what a router hands over to a connection may not be
written yet. So a router that is killed loses at most twice this of what it had delivered, unless the answer continues
elsewhere."""
MAX_CHECKPOINT_SHARE: Final = 0.02
"""Checkpoints take at most this share of the event loop's time; with very many requests they become rarer."""
CLOSE_SECONDS: Final = 1.0
REDIS_TIMEOUT_SECONDS: Final = 2.0
FOLDER: Final = "usage"


class Metering:
    """Call `start`, then `run` as a task, then `close`."""

    def __init__(
        self,
        config: KvloomConfig,
        router_id: str,
        incarnation_id: str,
        sealer: Sealer,
        prices: Callable[[], Prices],
        progress: Callable[[float], list[RequestEnded]],
        registry: CollectorRegistry = REGISTRY,
        *,
        retry_seconds: float = RETRY_SECONDS,
        scan_seconds: float = SCAN_SECONDS,
    ) -> None:
        """`progress(min_age_seconds)`: the records that there would be of the running requests of at least that
        age. `retry_seconds`: the time between two tries to write to the disk and to Redis while these fail;
        `scan_seconds`: that between two looks for the spools of routers that have died."""
        self._progress = progress
        self._metrics = MeteringMetrics(registry)
        root = Path(config.data_dir) / FOLDER
        self._spool = Spool(root / router_id / incarnation_id)
        self._thread = ThreadPoolExecutor(1, "usage-spool")
        producer = f"{router_id}/{incarnation_id}"
        self._meter = Meter(producer, prices)
        self._client = redis_client(
            config.redis.url,
            timeout_seconds=REDIS_TIMEOUT_SECONDS,
            retry=redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0),
        )
        stream = UsageStream(config.redis.key_prefix, sealer)
        self._writer = RecordWriter(
            self._spool, self._thread, self._on_ready, self._metrics, retry_seconds=retry_seconds
        )
        self._forwarder = Forwarder(
            producer,
            self._client,
            stream,
            self._read,
            self._on_stored,
            durable_number=lambda: self._writer.durable_number,
            retry_seconds=retry_seconds,
        )
        self._orphans = Orphans(root, self._spool.folder, self._thread, self._client, stream, scan_seconds)

    @property
    def producer(self) -> str:
        return self._meter.producer

    def request_ended(self, ended: RequestEnded) -> bytes:
        """Returns the JSON of its record; b"" if it was rejected, or there is no room."""
        if ended.end is RequestEnd.REJECTED:
            return b""
        return self._put(self._meter.record(ended, self._writer.last_number + 1))

    def tokens_lost(self, record: bytes, num_tokens: int) -> bytes:
        """Some of the tokens of an earlier record did not reach the client. Returns the one that replaces it."""
        corrected = self._meter.correction(record, self._writer.last_number + 1, num_tokens)
        self._put(corrected)
        return corrected

    def discarded(self, record: bytes) -> None:
        """The answer of an earlier record reaches nobody, and is not billed."""
        self._put(self._meter.discard(record, self._writer.last_number + 1))

    async def start(self) -> None:
        """Take the spool. If that fails, records stay in memory until it succeeds."""
        try:
            await self._in_thread(self._spool.open)
            self._writer.recent.open(self._spool.folder)
        except OSError as error:
            log.warning("spool_open_failed", cause=str(error))

    async def run(self) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._writer.run(), name="usage writer")
            tasks.create_task(self._forwarder.run(), name="usage forwarder")
            tasks.create_task(self._orphans.run(), name="usage orphans")
            tasks.create_task(self._checkpoint(), name="usage checkpoints")

    async def close(self) -> None:
        """All requests have ended: write their records, and forward them if that is quick. Another router finishes the
        spool otherwise."""
        await self._writer.flush()
        with contextlib.suppress(redis.exceptions.RedisError, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._forwarder.exchange()
        with contextlib.suppress(OSError):
            await self._in_thread(self._spool.remove_progress)
        self._writer.recent.close()
        await self._in_thread(self._spool.close)
        await self._client.aclose()
        self._thread.shutdown()

    def _put(self, record: bytes) -> bytes:
        self._metrics.records.inc()
        if not self._writer.has_room:
            self._metrics.dropped.inc()
            return b""
        self._writer.put(record)
        return record

    def _on_ready(self, records: Sequence[Numbered]) -> None:
        self._forwarder.offer(records)
        self._note_sizes()

    async def _on_stored(self, number: int) -> None:
        self._writer.stored(number)
        await self._in_thread(lambda: self._spool.trim(number))
        self._note_sizes()

    def _note_sizes(self) -> None:
        self._metrics.spool_bytes.set(self._spool.num_bytes)
        self._metrics.unstored.set(self._forwarder.num_unstored)

    async def _read(self, from_number: int, max_records: int) -> Sequence[Numbered]:
        return await self._in_thread(lambda: self._spool.read(from_number, max_records))

    async def _checkpoint(self) -> None:
        loop = asyncio.get_running_loop()
        earlier: tuple[int, list[RequestEnded]] = 0, []
        is_written = False
        """True when the file has any request."""
        while True:
            began_at = loop.time()
            latest = self._writer.last_number, self._progress(CHECKPOINT_SECONDS)
            spent_seconds = loop.time() - began_at
            if earlier[1] or is_written:
                is_written = bool(earlier[1])
                await self._write_progress(*earlier)
            earlier = latest
            await asyncio.sleep(max(CHECKPOINT_SECONDS, spent_seconds / MAX_CHECKPOINT_SHARE))

    async def _write_progress(self, after_number: int, running: Sequence[RequestEnded]) -> None:
        def write() -> None:
            self._spool.write_progress(after_number, [self._meter.progress(one) for one in running])

        with contextlib.suppress(OSError):  # the writer reports it, if the disk fails
            await self._in_thread(write)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
