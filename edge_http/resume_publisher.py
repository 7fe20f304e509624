"""Copies the events of resumable responses to the journal, a few times a second and all in one command.

Only of those that have lost their client, or have ended: while a client reads a running answer it has all that the
journal could have, and the rest of the answer dies with its edge either way. So a token costs nothing here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Final

import structlog
from redis.exceptions import RedisError

from edge_http.resume_journal import EdgeRecord, JournalEntry, ResumeJournal, encode_entries
from edge_http.resume_table import ResumeTable
from kvloom.config import EdgeResumeConfig

log = structlog.get_logger()

FLUSH_SECONDS: Final = 0.1
"""What an edge that dies may not have told the others."""
KEEP_SECONDS: Final = 1.0
"""How often the edge says that it is there. When Redis starts anew, empty, the others do not know where to pass clients
on to until then; it has nothing to do with finding out that an edge is not there."""
OUTLIVES_SECONDS: Final = 30.0
"""How much longer than the grace period a journal outlives its edge."""
RETRY_SECONDS: Final = 1.0
MAX_ENTRY_BYTES: Final = 2**20
"""The last response in an entry may exceed it, by no more than what is kept of one response."""


class ResumePublisher:
    """One per edge process. Redis may come and go: what could not be written is written later, as far as it is kept."""

    def __init__(
        self, table: ResumeTable, journal: ResumeJournal, config: EdgeResumeConfig, record: EdgeRecord, tag: str
    ) -> None:
        self._table = table
        self._journal = journal
        self._config = config
        self._record = record
        self._tag = tag
        self._ttl_seconds = journal_ttl_seconds(config)
        self._written: deque[tuple[float, int]] = deque()
        """Time and size of the entries in the journal, the oldest first."""
        self._num_bytes = 0
        self._kept_at = 0.0
        self._is_announced = False
        self._flushing = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._stopping.clear()
        self._task = asyncio.create_task(self._run(), name="resume publisher")

    async def stop(self) -> None:
        """Write what is left, if Redis takes it at once."""
        if self._task is None:
            return
        # Told, not cancelled: the Redis client may swallow a cancellation. It has timeouts of its own.
        self._stopping.set()
        await self._task
        self._task = None
        try:
            await self.flush()
        except RedisError as error:
            log.info("events of resumable responses were not written", error=str(error))

    async def _run(self) -> None:
        is_reachable = True
        while not self._stopping.is_set():
            pause_seconds = RETRY_SECONDS
            try:
                await self.flush()
                is_reachable = True
                pause_seconds = FLUSH_SECONDS
            except RedisError as error:
                self._kept_at = 0.0
                if is_reachable:
                    log.warning("resumable responses cannot be published", error=str(error))
                is_reachable = False
            except Exception:
                log.exception("publishing resumable responses broke")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await self._stopping.wait()

    async def flush(self) -> None:
        """Raises RedisError; then the same is tried again next time."""
        async with self._flushing:
            await self._flush()

    async def _flush(self) -> None:
        now = time.monotonic()
        if now - self._kept_at >= KEEP_SECONDS or not self._kept_at:
            self._forget_old(0)
            was_known = await self._journal.keep(self._tag, self._record, self._ttl_seconds, len(self._written))
            self._kept_at = now
            if self._is_announced and not was_known:
                self._write_again()
            self._is_announced = True
        is_complete = False
        while not is_complete:
            entries, is_complete = self._collect()
            if not entries:
                return
            await self._write(entries)

    def _write_again(self) -> None:
        """Redis has started anew, without what it had been told."""
        log.info("resumable responses are published again")
        self._written.clear()
        self._num_bytes = 0
        for stream in self._table.streams.values():
            stream.num_published, stream.end_published = 0, False

    def _collect(self) -> tuple[dict[str, JournalEntry], bool]:
        """New events by response, and whether that is all of them."""
        entries: dict[str, JournalEntry] = {}
        room_bytes = MAX_ENTRY_BYTES
        for response_id, stream in self._table.streams.items():
            events_log = stream.log
            if stream.is_attended and not stream.ended:
                continue
            if stream.num_published == events_log.num_events and stream.ended == stream.end_published:
                continue
            if room_bytes <= 0:
                return entries, False
            after = max(stream.num_published, events_log.num_forgotten)
            events = events_log.read_all(after)
            framed = b"".join(events)
            room_bytes -= len(framed)
            entries[response_id] = JournalEntry(
                response_id, stream.name.caller, after + 1, len(events), framed, stream.ended
            )
        return entries, True

    async def _write(self, entries: dict[str, JournalEntry]) -> None:
        encoded = encode_entries(entries.values())
        self._forget_old(len(encoded))
        await self._journal.append(self._tag, encoded, len(self._written) + 1)
        if not self._written:
            self._kept_at = 0.0  # the journal may be new, and has to expire like the rest
        self._written.append((time.monotonic(), len(encoded)))
        self._num_bytes += len(encoded)
        for response_id, entry in entries.items():
            stream = self._table.streams.get(response_id)
            if stream is not None:
                stream.num_published = entry.first_number + entry.num_events - 1
                stream.end_published = entry.ended

    def _forget_old(self, num_more_bytes: int) -> None:
        """Nobody comes back for what is older than the grace period; and the journal is bounded."""
        too_old = time.monotonic() - self._config.grace_seconds - 2 * FLUSH_SECONDS
        written = self._written
        while written and (
            written[0][0] < too_old or self._num_bytes + num_more_bytes > self._config.max_journal_bytes
        ):
            self._num_bytes -= written.popleft()[1]


def journal_ttl_seconds(config: EdgeResumeConfig) -> float:
    """How long an edge's journal outlives it."""
    return config.grace_seconds + OUTLIVES_SECONDS
