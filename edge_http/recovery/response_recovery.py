"""Responses whose edge has died: this edge continues or replays them from that edge's journal.

Each response is claimed first, because only one of the edges that are asked for it may continue it. The claim is
released if this edge does not continue the response.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Sequence
from typing import Final

import structlog
from aiohttp import web
from redis.exceptions import RedisError

from edge_http.admission import AdmissionPermit
from edge_http.edge import Edge
from edge_http.recovery.claims import Claim, ResumeClaims
from edge_http.recovery.journal import JournalCache, ResponseRow, ResumeJournal
from edge_http.recovery.takeover import recorded_formatter, take_over
from edge_http.resume.records import (
    AnswerState,
    ResponseRecord,
    event_data,
)
from edge_http.resume.remote_responses import FoundResponse
from edge_http.resume.response_name import edge_tag_of
from edge_http.resume.resumable_stream import CATCH_UP_BYTES, CATCH_UP_SECONDS, ResumableStream
from edge_http.resume.table import not_kept
from edge_http.wire.headers import REQUEST_ID, RESPONSE_ID, request_id
from edge_http.wire.sse import EventStream, ReplayedEventStream
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

log = structlog.get_logger()

MAX_UNFINISHED: Final = 4096


class ResponseRecovery:
    """The responses of edges that have died. If KvloomError (NOT_FOUND, EVENTS_GONE, QUEUE_FULL, DRAINING) is raised,
    nothing was sent. RedisError is raised while the journal cannot be read."""

    def __init__(self, edge: Edge, journal: ResumeJournal, claims: ResumeClaims) -> None:
        self._edge = edge
        self._journal = journal
        self._claims = claims
        self._tag = edge.tag
        self._journals = JournalCache(journal)
        self._taking: dict[str, asyncio.Task[ResumableStream | AnswerState | None]] = {}
        """By response id: the takeovers under way."""
        self._unfinished: dict[str, tuple[Claim, Claim]] = {}
        """By response id, the oldest first: the previous claim, and the claim of this edge, for takeovers that were cut
        short. Redis may execute a command whose answer was not awaited any more, so the claim may exist."""

    async def close(self) -> None:
        tasks = list(self._taking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def claim_before(self, response_id: str) -> Claim | None:
        """The claim that this edge replaced in a takeover that was cut short; None if there was no such takeover."""
        return self._unfinished.get(response_id, (None,))[0]

    async def find_claimed(self, response_id: str, caller: bytes) -> ResumableStream | None:
        """The stream of a response that this edge has claimed; waits for a takeover that is under way."""
        task = self._taking.get(response_id)
        if task is not None:
            with contextlib.suppress(KvloomError, RedisError):
                await asyncio.shield(task)
        return self._edge.resume.find(response_id, caller)

    async def recover(
        self, request: web.BaseRequest, response_id: str, claim: Claim, caller: bytes, after: int
    ) -> FoundResponse | None:
        """Continue or replay a response. `claim` is that of the edge that has died. Returns None if another edge was
        faster."""
        row, source = await self._row(response_id, claim)
        response = row.response
        if not hmac.compare_digest(response.caller, caller):
            raise not_kept()
        if row.snapshot is None:
            return await self._replay(request, response, await self._state(source, row), after)
        stream = self._edge.resume.find(response_id, caller)
        if stream is not None:  # it was taken over for another client meanwhile
            return stream
        task = self._taking.get(response_id)
        if task is None:
            job = self._take(response_id, claim, source, after, response.tenant)
            task = asyncio.create_task(job, name=f"take over {response_id}")
            self._taking[response_id] = task
            task.add_done_callback(lambda _: self._taking.pop(response_id, None))
        taken = await asyncio.shield(task)
        if isinstance(taken, AnswerState):
            return await self._replay(request, response, taken, after)
        return taken

    # -- taking one over ----------------------------------------------------------------------------------------------

    async def _take(
        self, response_id: str, claim: Claim, source: str, after: int, tenant: str
    ) -> ResumableStream | AnswerState | None:
        """Returns the stream that continues at this edge now, or the state of an answer that has ended, or None if
        another edge was faster. `source` is the tag of the edge that wrote the response."""
        with self._edge.admission.admit(tenant) as permit:
            wanted = self._note_unfinished(response_id, claim, source)
            before = None if claim.holder == edge_tag_of(response_id) == claim.source else claim
            found: ResumableStream | AnswerState | KvloomError | None = None
            if await self._claims.claim(response_id, before, wanted, claim.holder) == wanted:
                try:
                    found = await self._take_claimed(response_id, claim, permit, after)
                except KvloomError as error:
                    found = error
                if not isinstance(found, ResumableStream):
                    await self._claims.release(response_id, wanted, before, claim.holder)
            self._unfinished.pop(response_id, None)
            if isinstance(found, KvloomError):
                raise found
            return found

    def _note_unfinished(self, response_id: str, before: Claim, source: str) -> Claim:
        """Returns the claim to make: that of the last takeover, which may exist already, if it replaced the same claim
        `before`."""
        last_before, wanted = self._unfinished.get(response_id, (None, None))
        if wanted is None or last_before != before:
            wanted = Claim(self._tag, source)
        while len(self._unfinished) >= MAX_UNFINISHED:
            del self._unfinished[next(iter(self._unfinished))]
        self._unfinished[response_id] = (before, wanted)
        return wanted

    async def _take_claimed(
        self, response_id: str, claim: Claim, permit: AdmissionPermit, after: int
    ) -> ResumableStream | AnswerState:
        row, source = await self._row(response_id, claim)
        response = row.response
        state = await self._state(source, row)
        if state.ended or row.snapshot is None:
            return state
        if row.requests is None or not state.is_whole or after > state.num_events:
            raise _rest_is_lost()
        link_ids = await self._journal.link_ids({source, claim.holder})
        stream = take_over(self._edge, permit, response, row.requests, state, link_ids)
        self._edge.metrics.on_taken_over()
        log.info("response_taken_over", response_id=response_id, num_events=state.num_events)
        return stream

    # -- reading the journal ------------------------------------------------------------------------------------------

    async def _row(self, response_id: str, claim: Claim) -> tuple[ResponseRow, str]:
        """Returns the response's row, and the tag of the edge that wrote it: the edge that took the response over may
        not have written any yet."""
        source = claim.holder
        row = await self._journal.read_response(source, response_id)
        if row is None and claim.source != source:
            source = claim.source
            row = await self._journal.read_response(source, response_id)
        if row is None:
            raise not_kept()
        return row, source

    async def _state(self, tag: str, row: ResponseRow) -> AnswerState:
        response = row.response
        state = AnswerState(len(response.prompt_sizes) * response.n, len(response.prompt_sizes))
        journal = await self._journals.deltas_of(tag, response.number)
        state.apply_all(row.snapshot, journal)
        return state

    async def _replay(
        self, request: web.BaseRequest, response: ResponseRecord, state: AnswerState, after: int
    ) -> web.StreamResponse:
        """Send the events of an answer that has ended."""
        num_before = state.num_events - len(state.events)
        if not state.ended:
            raise not_kept() if not state.num_events else _rest_is_lost()
        if after >= state.num_events:
            return web.Response(status=204)
        if after < num_before:
            message = f"Events {after + 1} to {num_before} of this response are no longer kept."
            raise KvloomError(ErrorReason.ERROR_REASON_EVENTS_GONE, message)
        formatter = recorded_formatter(response, self._edge.models.find(response.model))
        missed = event_data(state.events[after - num_before :], formatter.prefixes, formatter.suffix)
        kind = ReplayedEventStream if request.method == "POST" else EventStream
        events = kind(
            request, self._edge.config.max_buffered_bytes, self._edge.write_coalescer, last_event_number=after
        )
        events.begin({REQUEST_ID: request_id(request), RESPONSE_ID: response.id})
        await _write(events, request, missed)
        events.end()
        return events.response()


async def _write(events: EventStream, request: web.BaseRequest, missed: Sequence[bytes]) -> None:
    """Raises ConnectionResetError if the client reads too slowly."""
    begin = size_bytes = 0
    for end, event in enumerate(missed, 1):
        size_bytes += len(event)
        if size_bytes < CATCH_UP_BYTES and end < len(missed):
            continue
        events.replay(missed[begin:end])
        begin, size_bytes = end, 0
        try:
            async with asyncio.timeout(CATCH_UP_SECONDS):
                await request.writer.drain()
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client reads too slowly") from error


def _rest_is_lost() -> KvloomError:
    message = "The server that was writing this answer is gone, and too little of the answer was saved to continue it."
    return KvloomError(ErrorReason.ERROR_REASON_EVENTS_GONE, message)
