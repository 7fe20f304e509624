"""Brings the records of one producer to the control service, by a stream in Redis.

Every record is sent at least once, and control counts it once, by its number. The forwarder learns from control how far
its records are stored. An entry of the stream that is gone although control does not have it was lost by Redis, and so
was what followed: all of it is sent again, from memory or from the spool.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import redis.asyncio
import redis.exceptions
import structlog

from kvloom_common.process.cancellation import raise_if_cancelled
from kvloom_common.tenancy.usage_stream import NOTHING_STORED, Stored, UsageStream
from router.metering.spool import Numbered

log = structlog.get_logger()

POLL_SECONDS: Final = 0.5
GATHER_SECONDS: Final = 0.25
"""Records that arrive within this time after an exchange are sent together, since an exchange takes as long for many as
for few."""
RETRY_SECONDS: Final = 1.0
MAX_ENTRY_RECORDS: Final = 256
MAX_ENTRIES: Final = 8
"""Entries that are sent in one pipeline."""
MAX_UNSTORED: Final = 20_000
"""Records that are sent and not stored: it bounds the stream, while the control service is away."""
MAX_WINDOW_BYTES: Final = 8 * 2**20
"""Records on the disk that are also kept in memory."""
MAX_READ_RECORDS: Final = 2048
MAX_MISSED_POLLS: Final = 2
"""An entry that control has just stored is gone a moment before control says so."""


class _Sent(msgspec.Struct, gc=False):
    last_number: int
    entry_id: bytes
    num_missed_polls: int = 0


Reader = Callable[[int, int], Awaitable[Sequence[Numbered]]]
"""(the first number, how many) → records from the spool. Raises OSError."""


class Forwarder:
    """`run` is its task."""

    def __init__(
        self,
        producer: str,
        client: redis.asyncio.Redis,
        stream: UsageStream,
        read: Reader,
        on_stored: Callable[[int], Awaitable[None]],
        *,
        durable_number: Callable[[], int],
        closed_after: int | None = None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """`closed_after`: the producer has ended with this number; `run` returns once control has closed it."""
        self._producer = producer
        self._client = client
        self._retry_seconds = retry_seconds
        self._stream = stream
        self._read = read
        self._on_stored = on_stored
        self._durable_number = durable_number
        self._closed_after = closed_after
        self._window: deque[Numbered] = deque()
        """The latest records, without a gap."""
        self._num_window_bytes = 0
        self._last_number = closed_after or 0
        self._next_number = 1
        """The first that has not been sent."""
        self._sent: deque[_Sent] = deque()
        self._is_end_sent = False
        self._exchanged_at = -math.inf
        self._is_failing = False
        self._wake = asyncio.Event()
        self.stored = NOTHING_STORED

    @property
    def num_unstored(self) -> int:
        return max(0, self._last_number - self.stored.number)

    def offer(self, records: Iterable[Numbered]) -> None:
        """New records, in order."""
        for record in records:
            self._window.append(record)
            self._num_window_bytes += len(record[1])
            self._last_number = record[0]
        durable_number = self._durable_number()
        while self._num_window_bytes > MAX_WINDOW_BYTES and self._window[0][0] <= durable_number:
            self._forget_first()
        self._wake.set()

    async def run(self) -> None:
        """Runs until it is cancelled, or control has closed the producer."""
        while not self.stored.is_closed:
            try:
                await self.exchange()
                self._note_success()
            except (redis.exceptions.RedisError, OSError) as error:
                self._note_failure(error)
            raise_if_cancelled()
            try:
                async with asyncio.timeout(self._retry_seconds if self._is_failing else POLL_SECONDS):
                    await self._wake.wait()
                    if self._is_failing:
                        await asyncio.Event().wait()  # for the whole time
            except TimeoutError:
                continue
            if self._num_unsent < MAX_ENTRY_RECORDS:
                await asyncio.sleep(self._exchanged_at + GATHER_SECONDS - asyncio.get_running_loop().time())

    @property
    def _num_unsent(self) -> int:
        return self._last_number + 1 - self._next_number

    async def exchange(self) -> None:
        """Learn what is stored, and send what there is. Raises RedisError, and OSError where the spool cannot be
        read."""
        self._wake.clear()
        self._exchanged_at = asyncio.get_running_loop().time()
        await self._learn()
        await self._send()

    async def _learn(self) -> None:
        first = self._sent[0] if self._sent else None
        pipeline = self._client.pipeline(transaction=True)
        pipeline.hget(self._stream.stored, self._producer)
        if first is not None:
            pipeline.xrange(self._stream.stream, first.entry_id, first.entry_id)
        value, *found = await pipeline.execute()
        await self._note_stored(self._stream.read_stored(self._producer, value))
        if first is not None and self._sent and self._sent[0] is first and not found[0]:
            first.num_missed_polls += 1
            if first.num_missed_polls >= MAX_MISSED_POLLS:
                log.warning("usage_records_lost", producer=self._producer)
                self._sent.clear()
                self._next_number = self.stored.number + 1
                self._is_end_sent = False

    async def _note_stored(self, stored: Stored) -> None:
        if stored.number <= self.stored.number and stored.is_closed == self.stored.is_closed:
            return
        self.stored = stored
        self._next_number = max(self._next_number, stored.number + 1)
        while self._sent and self._sent[0].last_number <= stored.number:
            self._sent.popleft()
        while self._window and self._window[0][0] <= stored.number:
            self._forget_first()
        await self._on_stored(stored.number)

    async def _send(self) -> None:
        while self._next_number <= self._last_number and self._next_number - self.stored.number <= MAX_UNSTORED:
            records = await self._records()
            if not records:
                log.error("spool_gap_found", producer=self._producer, number=self._next_number)
                self._next_number = self._last_number + 1
                break
            parts = [records[at : at + MAX_ENTRY_RECORDS] for at in range(0, len(records), MAX_ENTRY_RECORDS)]
            pipeline = self._client.pipeline(transaction=False)
            for part in parts:
                self._add(pipeline, [record for _, record in part])
            ids = await pipeline.execute()
            for part, entry_id in zip(parts, ids, strict=True):
                self._sent.append(_Sent(part[-1][0], entry_id))
            self._next_number = records[-1][0] + 1
        if self._closed_after is not None and self._next_number > self._closed_after and not self._is_end_sent:
            pipeline = self._client.pipeline(transaction=False)
            self._add(pipeline, [], self._closed_after)
            [entry_id] = await pipeline.execute()
            self._sent.append(_Sent(self._closed_after + 1, entry_id))
            self._is_end_sent = True

    def _add(self, pipeline: Any, records: Sequence[bytes], closed_after: int | None = None) -> None:
        fields = self._stream.entry(self._producer, records, closed_after)
        pipeline.xadd(self._stream.stream, fields)

    async def _records(self) -> Sequence[Numbered]:
        """The next to send: from memory, or from the spool what is no longer there."""
        most = MAX_ENTRIES * MAX_ENTRY_RECORDS
        if self._window and self._window[0][0] <= self._next_number:
            skipped = self._next_number - self._window[0][0]
            return [self._window[i] for i in range(skipped, min(len(self._window), skipped + most))]
        return await self._read(self._next_number, min(most, MAX_READ_RECORDS))

    def _forget_first(self) -> None:
        self._num_window_bytes -= len(self._window.popleft()[1])

    def _note_failure(self, error: Exception) -> None:
        if not self._is_failing:
            log.warning("usage_forward_failed", cause=type(error).__name__)
        self._is_failing = True

    def _note_success(self) -> None:
        if self._is_failing:
            log.info("usage_forward_resumed")
        self._is_failing = False
