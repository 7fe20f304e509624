"""Brings usage records into the spool, off the event loop.

While the disk is full, or fails, requests are served as ever: their records stay in memory up to a bound, are forwarded
from there, and are written as soon as that works again. Beyond the bound records are lost, and counted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final

import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from router import metric_table as table
from router.metering.recent import RecentRecords
from router.metering.spool import Numbered, Spool

log = structlog.get_logger()

GATHER_SECONDS: Final = 0.05
"""Records that arrive within this time are written together."""
RETRY_SECONDS: Final = 1.0
MAX_WAITING_BYTES: Final = 16 * 2**20
"""The size of the records that are only in memory."""
MAX_BATCH: Final = 4096


class MeteringMetrics:
    """How far usage records have come, updated once per batch. All names begin with `kvloom_router_usage_`."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.records = table.USAGE_RECORDS.series(registry)
        self.dropped = table.USAGE_RECORDS_DROPPED.series(registry)
        self.unwritten = table.USAGE_RECORDS_UNWRITTEN.gauge(registry)
        self.spool_bytes = table.USAGE_SPOOL_BYTES.gauge(registry)
        self.unstored = table.USAGE_RECORDS_UNSTORED.gauge(registry)


class RecordWriter:
    """Numbers records and takes them without waiting. `run` is its task."""

    def __init__(
        self,
        spool: Spool,
        thread: Executor,
        on_ready: Callable[[Sequence[Numbered]], None],
        metrics: MeteringMetrics,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """`thread` is the one that uses the spool. `on_ready` gets each record once: when it is on the disk, or when
        that has failed."""
        self._spool = spool
        self._thread = thread
        self._on_ready = on_ready
        self._metrics = metrics
        self._max_waiting_bytes = max_waiting_bytes
        self._retry_seconds = retry_seconds
        self._waiting: deque[Numbered] = deque()
        """Records that are not on the disk, in order."""
        self._num_handed_over = 0
        """So many of these, from the first on, `on_ready` has got."""
        self._num_waiting_bytes = 0
        self._is_failing = False
        self._wake = asyncio.Event()
        self.recent = RecentRecords()
        self.last_number = 0
        """The number of the latest record."""
        self.durable_number = 0
        """All records up to this one are on the disk, or stored."""

    @property
    def has_room(self) -> bool:
        return self._num_waiting_bytes < self._max_waiting_bytes

    def put(self, record: bytes) -> None:
        """The JSON of the record `last_number` + 1. There must be room."""
        self.last_number += 1
        self.recent.put(self.last_number, record, self.durable_number)
        self._waiting.append((self.last_number, record))
        self._num_waiting_bytes += len(record)
        self._wake.set()

    def stored(self, number: int) -> None:
        """The control service has all records up to that number: they need not be written any more."""
        while self._num_handed_over and self._waiting[0][0] <= number:
            self._forget_first()
            self._num_handed_over -= 1
        self.durable_number = max(self.durable_number, number)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._retry_seconds if self._is_failing else GATHER_SECONDS)
            self._wake.clear()
            await self.flush()
            if self._waiting:
                self._wake.set()

    async def flush(self) -> None:
        """Write what waits; after a failure it still waits."""
        while self._waiting:
            batch = list(itertools.islice(self._waiting, MAX_BATCH))
            is_written = await self._write(batch)
            # Records that were stored meanwhile have left the front.
            last = batch[-1][0]
            waiting = list(itertools.islice(self._waiting, self._num_handed_over, None))
            new = [record for record in waiting if record[0] <= last] if is_written else waiting
            if is_written:
                while self._waiting and self._waiting[0][0] <= last:
                    self._forget_first()
                self._num_handed_over = 0
                self.durable_number = max(self.durable_number, last)
                self._on_ready(new)
                continue
            self._num_handed_over = len(self._waiting)
            self._on_ready(new)
            break
        self._metrics.unwritten.set(len(self._waiting))

    async def _write(self, batch: Sequence[Numbered]) -> bool:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._spool.append, batch)
        except OSError as error:
            if not self._is_failing:
                log.warning("usage_write_failed", cause=str(error))
            self._is_failing = True
            return False
        if self._is_failing:
            log.info("usage_write_resumed")
        self._is_failing = False
        return True

    def _forget_first(self) -> None:
        self._num_waiting_bytes -= len(self._waiting.popleft()[1])
