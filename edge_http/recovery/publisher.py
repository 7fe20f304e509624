"""Writes the progress of resumable responses to the journal: all that is new goes in one command, as soon as the
previous command is answered. What arrives meanwhile goes with the next one, so that an engine step costs at most one
command, whatever the number of streams.

Events are held back until they are written (edge_http/resume/commit_gate.py). Responses that another edge has taken
over are released.
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
from edge_http.resume.table import ResumeTable
from kvloom_common.process.aligned_timer import seconds_to_aligned_tick
from kvloom_common.replay.stream_retention import ResumeSettings

log = structlog.get_logger()

PAUSE_SECONDS: Final = 0.002
"""The pause between two writes: shards whose steps are not aligned must not cause a write each."""
KEEP_SECONDS: Final = 1.0
"""How often the edge announces itself. After Redis has restarted empty, the other edges cannot forward clients to this
one until it does. Detecting that an edge is gone does not depend on it."""
OUTLIVES_SECONDS: Final = 30.0
"""How much longer than the grace period a journal outlives its edge."""
SHORTEST_WINDOW_SECONDS: Final = 5.0
"""The journal reaches back at least that far, if its size allows."""
RETRY_SECONDS: Final = 1.0
MAX_ENTRY_BYTES: Final = 2**20
"""The last response in an entry may exceed it, by no more than the log of one response."""


class ResumePublisher:
    """There is one per edge process. Redis may come and go: what could not be written is written later, if it is still
    kept."""

    def __init__(
        self,
        table: ResumeTable,
        journal: ResumeJournal,
        config: ResumeSettings,
        own_record: Callable[[], EdgeRecord],
        tag: str,
    ) -> None:
        self.gate: CommitGate[Publication] = CommitGate(config.commit_seconds)
        table.publish_with(self.gate, self._on_removed, is_encrypted=journal.is_encrypted)
        self._table = table
        self._journal = journal
        self._config = config
        self._own_record = own_record
        self._tag = tag
        self._ttl_seconds = journal_ttl_seconds(config)
        self._window_seconds = max(config.grace_seconds, SHORTEST_WINDOW_SECONDS)
        self._written: deque[tuple[float, int]] = deque()
        """Time and size of the entries that are, or may be, in the journal; the oldest comes first."""
        self._num_bytes = 0
        self._position = 0
        """The number of bytes ever written to the journal."""
        self._requests_bytes: dict[str, int] = {}
        """Size of the encoded requests of running responses, by response id."""
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
        """Write what is left, if Redis accepts it at once. Returns False if it does not, or if this edge had stopped
        before."""
        if self._task is None:
            return False
        self.gate.hold()  # another edge can continue from whatever is shown from here on
        # An event, not a cancellation: the Redis client may swallow a cancellation. It has timeouts of its own.
        self._stopping.set()
        self.gate.wake.set()
        await self._task
        self._task = None
        try:
            await self.flush()
        except RedisError as error:
            log.info("journal_flush_failed", error=str(error))
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
                    log.warning("journal_write_failed", error=str(error))
                is_reachable = False
                await self._pause(RETRY_SECONDS)
            except Exception:
                log.exception("journal_writer_broke")
                await self._pause(RETRY_SECONDS)
            else:
                await self._wait_for_work()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _wait_for_work(self) -> None:
        """Return when something is noted, or when the edge has to announce itself again."""
        await asyncio.sleep(PAUSE_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._keep_at - time.monotonic())):
                await self.gate.wake.wait()

    async def flush(self) -> None:
        """Raises RedisError; then the next flush tries the same again."""
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
        """Returns False if there was no room for everything."""
        noted = self.gate.take()
        forgotten, self._forgotten = self._forgotten, []
        try:
            written, left, taken = await self._write(noted, forgotten)
        except BaseException:
            self._forgotten = forgotten + self._forgotten
            for publication in noted:
                publication.snapshot_at = 0.0
            self.gate.fail()
            raise
        for publication in written:
            publication.mark_written()
        self._release(taken)
        self.gate.commit()
        for publication in left:
            if not publication.is_noted:
                self.gate.note(publication)
        if taken:
            await self._journal.forget_taken(self._tag, taken)
        return not left

    async def _keep(self, now: float) -> None:
        self._forget_old(0)
        was_known, taken = await self._journal.keep(
            self._tag, self._own_record(), self._ttl_seconds, len(self._written)
        )
        self._keep_at = now + seconds_to_aligned_tick(now, KEEP_SECONDS)
        self._release(taken)
        if self._is_announced and not was_known:
            self._write_again()
        self._is_announced = True
        for publication in self._table.publications.values():
            if not (publication.end_published or publication.is_noted) and self._is_old(publication, now):
                self.gate.note(publication)

    def _is_old(self, publication: Publication, now: float) -> bool:
        """The journal may soon not reach back to the response's last snapshot."""
        return (
            now - publication.snapshot_at > self._window_seconds / 2
            or self._position - publication.snapshot_position > self._config.max_journal_bytes / 2
        )

    def _write_again(self) -> None:
        """Redis has restarted and lost what it had."""
        log.info("journal_write_resumed")
        self._written.clear()
        self._num_bytes = 0
        for publication in self._table.publications.values():
            publication.start_over()
            if not publication.is_noted:
                self.gate.note(publication)

    async def _write(
        self, noted: Iterable[Publication], forgotten: list[str]
    ) -> tuple[list[Publication], list[Publication], set[str]]:
        """Returns the publications that were written, those that there was no room for, and the ids of the responses
        that other edges have taken over."""
        batch, written, left = JournalBatch(forgotten=forgotten), [], []
        room_bytes, now = MAX_ENTRY_BYTES, time.monotonic()
        for publication in noted:
            if self._table.publications.get(publication.response.id) is not publication:
                continue
            if room_bytes <= 0:
                left.append(publication)
                continue
            if publication.has_unpublished():
                delta = publication.drain()
                room_bytes -= sum(len(payload) for _, payload in delta.events)
                batch.deltas.append(delta)
                written.append(publication)
            self._describe(publication, batch, now)
        entry = encode(batch.deltas) if batch.deltas else b""
        if entry:
            self._forget_old(len(entry))
            # It is counted before Redis confirms it: Redis may accept it without an answer, and earlier entries must
            # not be pushed out by it then.
            self._note_written(now, len(entry))
        taken = await self._journal.write(self._tag, batch, entry, len(self._written), self._ttl_seconds)
        for publication in written:
            publication.opened = True
        for response_id in batch.kept_here:
            self._requests_bytes.pop(response_id, None)
        return written, left, taken

    def _describe(self, publication: Publication, batch: JournalBatch, now: float) -> None:
        """Add what goes into the response's hash: its records once, a snapshot from time to time, and its end."""
        response_id, ended = publication.response.id, publication.stream.ended
        if publication.is_kept_here and response_id in self._requests_bytes:
            batch.kept_here.append(response_id)
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
        """Returns b"" if there is no room for them: then no other edge can continue the response."""
        requests = publication.encode_requests()
        if sum(self._requests_bytes.values()) + len(requests) > self._config.max_journal_bytes:
            return b""
        self._requests_bytes[publication.response.id] = len(requests)
        return requests

    def _note_written(self, now: float, size_bytes: int) -> None:
        if not self._written:
            self._keep_at = 0.0  # the journal may be new, and needs its time to live
        self._written.append((now, size_bytes))
        self._num_bytes += size_bytes
        self._position += size_bytes

    def _release(self, taken: set[str]) -> None:
        """Other edges continue these responses: they took this edge to be dead."""
        if not taken:
            return
        log.warning("responses_ceded", num_responses=len(taken))
        for response_id in taken:
            self._table.release(response_id)

    def _on_removed(self, publication: Publication) -> None:
        """No client may find the response any more."""
        self._requests_bytes.pop(publication.response.id, None)
        if publication.opened and not self._stopping.is_set():
            self._forgotten.append(publication.response.id)
            self.gate.wake.set()

    def _forget_old(self, num_more_bytes: int) -> None:
        """Drop entries that are older than the grace period, since no client comes back for them, and those beyond the
        journal's size."""
        too_old = time.monotonic() - self._window_seconds
        written = self._written
        while written and (
            written[0][0] < too_old or self._num_bytes + num_more_bytes > self._config.max_journal_bytes
        ):
            self._num_bytes -= written.popleft()[1]


def journal_ttl_seconds(config: ResumeSettings) -> float:
    """How long the journal of an edge outlives the edge."""
    return config.grace_seconds + OUTLIVES_SECONDS
