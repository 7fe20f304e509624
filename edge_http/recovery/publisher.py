"""Writes the news of resumable responses to the journal: all that is there, in one command, as soon as the one before
is answered. What comes meanwhile goes with the next one: an engine's step costs at most one, whatever the number of
streams.

It holds events back until they are written (edge_http/resume/commit_gate.py), and lets go of responses that another
edge has taken over.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import structlog
from redis.exceptions import RedisError

from edge_http.recovery.journal import EdgeRecord, JournalBatch, ResumeJournal
from edge_http.resume.commit_gate import CommitGate
from edge_http.resume.publication import Publication
from edge_http.resume.records import encode
from edge_http.resume.resumable_stream import ResumableStream
from edge_http.resume.table import ResumeTable
from kvloom.config import EdgeResumeConfig
from kvloom.process.aligned_timer import seconds_to_aligned_tick

log = structlog.get_logger()

PAUSE_SECONDS: Final = 0.002
"""Between two writes: shards that are not in step must not make one each."""
LAZY_PAUSE_SECONDS: Final = 0.1
"""The same when no event waits for it."""
KEEP_SECONDS: Final = 1.0
"""How often the edge says that it is there. When Redis starts anew, empty, the others do not know where to pass clients
on to until then; it has nothing to do with finding out that an edge is not there."""
OUTLIVES_SECONDS: Final = 30.0
"""How much longer than the grace period a journal outlives its edge."""
SHORTEST_WINDOW_SECONDS: Final = 5.0
"""The journal goes back so far at least, if its size allows."""
RETRY_SECONDS: Final = 1.0
MAX_ENTRY_BYTES: Final = 2**20
"""The last response in an entry may exceed it, by no more than what is kept of one response."""


class ResumePublisher:
    """One per edge process. Redis may come and go: what could not be written is written later, as far as it is kept."""

    def __init__(
        self,
        table: ResumeTable,
        journal: ResumeJournal,
        config: EdgeResumeConfig,
        own_record: Callable[[], EdgeRecord],
        tag: str,
    ) -> None:
        self.gate: CommitGate[ResumableStream] = CommitGate(config.commit_seconds)
        table.publish_with(self.gate, self._on_removed)
        self._table = table
        self._journal = journal
        self._config = config
        self._own_record = own_record
        self._tag = tag
        self._ttl_seconds = journal_ttl_seconds(config)
        self._window_seconds = max(config.grace_seconds, SHORTEST_WINDOW_SECONDS)
        self._written: deque[tuple[float, int]] = deque()
        """Time and size of the entries that are in the journal or may be, the oldest first."""
        self._num_bytes = 0
        self._position = 0
        """Bytes that were ever written to the journal."""
        self._requests_bytes: dict[str, int] = {}
        """What is kept of running responses besides, by id."""
        self._forgotten: list[str] = []
        self._keep_at = 0.0
        self._is_announced = False
        self._flushing = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._stopping.clear()
        self._task = asyncio.create_task(self._run(), name="resume publisher")

    async def stop(self) -> bool:
        """Write what is left, if Redis takes it at once. False when it does not, or all was written before."""
        if self._task is None:
            return False
        self.gate.hold()  # what is shown from here on, another edge can go on from
        # Told, not cancelled: the Redis client may swallow a cancellation. It has timeouts of its own.
        self._stopping.set()
        self.gate.wake.set()
        await self._task
        self._task = None
        try:
            await self.flush()
        except RedisError as error:
            log.info("events of resumable responses were not written", error=str(error))
            self.gate.close()
            return False
        return True

    async def _run(self) -> None:
        is_reachable = True
        while not self._stopping.is_set():
            try:
                await self.flush()
                is_reachable = True
            except RedisError as error:
                self._keep_at = 0.0
                if is_reachable:
                    log.warning("resumable responses cannot be published", error=str(error))
                is_reachable = False
                await self._pause(RETRY_SECONDS)
            except Exception:
                log.exception("publishing resumable responses broke")
                await self._pause(RETRY_SECONDS)
            else:
                await self._wait_news()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _wait_news(self) -> None:
        """Or until the edge has to say again that it is there."""
        await asyncio.sleep(PAUSE_SECONDS if self._config.commit_seconds else LAZY_PAUSE_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._keep_at - time.monotonic())):
                await self.gate.wake.wait()

    async def flush(self) -> None:
        """Raises RedisError; then the same is tried again next time."""
        async with self._flushing:
            await self._flush()

    async def _flush(self) -> None:
        now = time.monotonic()
        if now >= self._keep_at:
            await self._keep(now)
        is_complete = not self.gate.wake.is_set()
        while not is_complete:
            is_complete = await self._write_noted()

    async def _write_noted(self) -> bool:
        """False when there was no room for all."""
        streams = self.gate.take()
        forgotten, self._forgotten = self._forgotten, []
        try:
            written, left, taken = await self._write(streams, forgotten)
        except BaseException:
            self._forgotten = forgotten + self._forgotten
            self._want_snapshots(streams)
            self.gate.fail()
            raise
        for publication in written:
            publication.mark_written()
        self._let_go(taken)
        self.gate.commit()
        for stream in left:
            if not stream.is_noted:
                self.gate.note(stream)
        if taken:
            await self._journal.forget_taken(self._tag, taken)
        return not left

    def _want_snapshots(self, streams: Iterable[ResumableStream]) -> None:
        for stream in streams:
            publication = self._table.publications.get(stream.name.id)
            if publication is not None:
                publication.snapshot_at = 0.0

    async def _keep(self, now: float) -> None:
        self._forget_old(0)
        was_known, taken = await self._journal.keep(
            self._tag, self._own_record(), self._ttl_seconds, len(self._written)
        )
        self._keep_at = now + seconds_to_aligned_tick(now, KEEP_SECONDS)
        self._let_go(taken)
        if self._is_announced and not was_known:
            self._write_again()
        self._is_announced = True
        for publication in self._table.publications.values():
            if not (publication.end_published or publication.stream.is_noted) and self._is_old(publication, now):
                self.gate.note(publication.stream)

    def _is_old(self, publication: Publication, now: float) -> bool:
        """What the journal has of it may soon not be enough to go on from."""
        return (
            now - publication.snapshot_at > self._window_seconds / 2
            or self._position - publication.snapshot_position > self._config.max_journal_bytes / 2
        )

    def _write_again(self) -> None:
        """Redis has started anew, without what it had been told."""
        log.info("resumable responses are published again")
        self._written.clear()
        self._num_bytes = 0
        for publication in self._table.publications.values():
            publication.start_over()
            if not publication.stream.is_noted:
                self.gate.note(publication.stream)

    async def _write(
        self, streams: Iterable[ResumableStream], forgotten: list[str]
    ) -> tuple[list[Publication], list[ResumableStream], set[str]]:
        """Returns what was written, what there was no room for, and what others have taken over."""
        batch, written, left = JournalBatch(forgotten=forgotten), [], []
        room_bytes, now = MAX_ENTRY_BYTES, time.monotonic()
        for stream in streams:
            publication = self._table.publications.get(stream.name.id)
            if publication is None or publication.stream is not stream:
                continue
            if room_bytes <= 0:
                left.append(stream)
                continue
            if publication.has_news():
                news = publication.drain()
                room_bytes -= sum(len(payload) for _, payload in news.events)
                batch.news.append(news)
                written.append(publication)
            self._describe(publication, batch, now)
        entry = encode(batch.news) if batch.news else b""
        if entry:
            self._forget_old(len(entry))
            # Even if Redis is not heard to have taken it: it may have, and then what came before must have its place.
            self._note_written(now, len(entry))
        taken = await self._journal.write(self._tag, batch, entry, len(self._written), self._ttl_seconds)
        for publication in written:
            publication.opened = True
        return written, left, taken

    def _describe(self, publication: Publication, batch: JournalBatch, now: float) -> None:
        """In the response's hash: once, from time to time, and at its end."""
        response_id, ended = publication.response.id, publication.stream.ended
        if not publication.opened:
            response = encode(publication.response)
            snapshot = encode(publication.snapshot())
            batch.opened.append((response_id, response, self._requests_of(publication), snapshot))
        elif not ended and self._is_old(publication, now):
            publication.snapshot_at = 0.0
            batch.snapshots.append((response_id, encode(publication.snapshot())))
        if publication.is_taken_over and not publication.snapshot_at:
            batch.claimed.append(response_id)
        if not publication.snapshot_at:
            publication.snapshot_at, publication.snapshot_position = now, self._position
        if ended:
            batch.ended.append(response_id)
            self._requests_bytes.pop(response_id, None)

    def _requests_of(self, publication: Publication) -> bytes:
        """b"" when there is no room for them: the response cannot be gone on with elsewhere."""
        requests = publication.encode_requests()
        if sum(self._requests_bytes.values()) + len(requests) > self._config.max_journal_bytes:
            return b""
        self._requests_bytes[publication.response.id] = len(requests)
        return requests

    def _note_written(self, now: float, size_bytes: int) -> None:
        if not self._written:
            self._keep_at = 0.0  # the journal may be new, and has to expire like the rest
        self._written.append((now, size_bytes))
        self._num_bytes += size_bytes
        self._position += size_bytes

    def _let_go(self, taken: set[str]) -> None:
        """Another edge goes on with these: it took this one to be dead."""
        if not taken:
            return
        log.warning("other edges have taken over responses", num_responses=len(taken))
        for response_id in taken:
            self._table.let_go(response_id)

    def _on_removed(self, publication: Publication) -> None:
        """Nobody may have it any more."""
        self._requests_bytes.pop(publication.response.id, None)
        if publication.opened and not self._stopping.is_set():
            self._forgotten.append(publication.response.id)
            self.gate.wake.set()

    def _forget_old(self, num_more_bytes: int) -> None:
        """Nobody comes back for what is older than the grace period; and the journal is bounded."""
        too_old = time.monotonic() - self._window_seconds
        written = self._written
        while written and (
            written[0][0] < too_old or self._num_bytes + num_more_bytes > self._config.max_journal_bytes
        ):
            self._num_bytes -= written.popleft()[1]


def journal_ttl_seconds(config: EdgeResumeConfig) -> float:
    """How long an edge's journal outlives it."""
    return config.grace_seconds + OUTLIVES_SECONDS
