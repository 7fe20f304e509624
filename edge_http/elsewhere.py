"""Responses that another edge began: passed on to it while it lives, gone on with from its journal when it has died."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Sequence
from typing import Final

import structlog
from aiohttp import web
from redis.exceptions import RedisError

from edge_http.edge import Edge, stopping
from edge_http.headers import REQUEST_ID, RESPONSE_ID, request_id
from edge_http.lost_journals import LostJournals
from edge_http.relay import MISDIRECTED, RELAYED, OwnerLostError, Relay
from edge_http.response_name import ResponseName
from edge_http.resumable import CATCH_UP_BYTES, CATCH_UP_SECONDS, ResumableStream
from edge_http.resume_claims import Claim, KeyedResponse, ResumeClaims
from edge_http.resume_journal import EdgesUnknownError, ResponseRow, ResumeJournal, tag_of
from edge_http.resume_records import (
    AnswerState,
    ResponseRecord,
    decode_news,
    decode_requests,
    decode_response,
    framed_events,
)
from edge_http.resume_table import not_kept, other_request
from edge_http.sse import EventStream
from edge_http.takeover import shape_of, take_over
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

log = structlog.get_logger()

MAX_HOPS: Final = 4
"""Edges that may have had a response, one after the other, while a client waits."""

Found = web.StreamResponse | ResumableStream


class Elsewhere:
    """The way to the responses of the other edges."""

    def __init__(self, edge: Edge, journal: ResumeJournal, claims: ResumeClaims, relay: Relay) -> None:
        self._edge = edge
        self._journal = journal
        self._claims = claims
        self._relay = relay
        self._tag = edge.tag
        self._has_left = False
        self._lost = LostJournals(journal)
        self._taking: dict[str, asyncio.Task[ResumableStream | AnswerState | None]] = {}
        """By response id: attempts to take one over."""
        self._naming: dict[tuple[bytes, str], tuple[asyncio.Lock, int]] = {}
        """By idempotency key: requests that look it up, one after the other, and how many they are."""

    async def find(self, request: web.BaseRequest, response_id: str, caller: bytes, after: int) -> Found:
        """What another edge answers, what it left, or the stream, which goes on here now. Raises KvloomError
        (NOT_FOUND, EVENTS_GONE, QUEUE_FULL, DRAINING, INTERNAL) as long as nothing was sent."""
        for _ in range(MAX_HOPS):
            claim = await self._holder(request, response_id)
            if isinstance(claim, web.StreamResponse):
                return claim
            if claim.holder == self._tag:
                return await self._taken(response_id, caller)
            try:
                return await self._pass_on(request, response_id, claim)
            except OwnerLostError as lost:
                log.info("the edge of a response is gone", response_id=response_id, error=str(lost))
            found = await self._go_on(request, response_id, claim, caller, after)
            if found is not None:
                return found
        raise _cannot_look()

    async def cancel(self, request: web.BaseRequest, response_id: str) -> web.StreamResponse:
        """Raises KvloomError (NOT_FOUND, DRAINING, INTERNAL)."""
        claim = await self._holder(request, response_id)
        if isinstance(claim, web.StreamResponse):
            return claim
        if claim.holder == self._tag:
            raise self._missing()
        try:
            return await self._pass_on(request, response_id, claim)
        except OwnerLostError as lost:
            raise not_kept() from lost  # what a dead edge ran has been cancelled by the router

    async def find_by_key(self, request: web.BaseRequest, name: ResponseName, after: int) -> Found | None:
        """The response that another edge began under the same idempotency key. None: from now on the key stands for
        `name`. While Redis is away a key is known to one edge only. Raises KvloomError."""
        before: KeyedResponse | None = None
        for _ in range(MAX_HOPS):
            async with self._alone(name.caller, name.idempotency_key):
                stream = self._edge.resume.find_by_key(name.caller, name.idempotency_key)
                if stream is not None and stream.name.body_digest == name.body_digest:
                    return stream
                now = await self._named(name, before)
                if now.response_id == name.id:
                    if after:
                        raise not_kept()
                    return None
            if now.body_digest != name.body_digest:
                raise other_request()
            try:
                return await self._find_named(request, now.response_id, name.caller, after)
            except KvloomError as error:
                if error.reason != ErrorReason.ERROR_REASON_NOT_FOUND:
                    raise
            before = now  # refused, cancelled, or forgotten
        raise _cannot_look()

    async def _named(self, name: ResponseName, before: KeyedResponse | None) -> KeyedResponse:
        """What the key of `name` stands for now."""
        wanted = KeyedResponse(name.id, name.body_digest)
        try:
            return await self._claims.name(name.caller, name.idempotency_key, before, wanted, self._key_seconds)
        except RedisError as error:
            log.info("an idempotency key cannot be looked up", error=str(error))
            return wanted

    async def _find_named(self, request: web.BaseRequest, response_id: str, caller: bytes, after: int) -> Found:
        stream = self._edge.resume.find(response_id, caller)
        return stream or await self.find(request, response_id, caller, after)

    @property
    def _key_seconds(self) -> float:
        config = self._edge.config
        return config.request_timeout_seconds + 2 * config.resume.grace_seconds

    @contextlib.asynccontextmanager
    async def _alone(self, caller: bytes, key: str) -> AsyncIterator[None]:
        """One request of a key at a time, until its response is open or found."""
        lock, count = self._naming.get((caller, key), (asyncio.Lock(), 0))
        self._naming[caller, key] = (lock, count + 1)
        try:
            async with lock:
                yield
        finally:
            lock, count = self._naming.pop((caller, key))
            if count > 1:
                self._naming[caller, key] = (lock, count - 1)

    def leave(self) -> None:
        """This edge stops: what it has not, or has no longer, others may go on with."""
        self._has_left = True

    async def close(self) -> None:
        tasks = list(self._taking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._relay.close()

    # -- while its edge lives -----------------------------------------------------------------------------------------

    async def _holder(self, request: web.BaseRequest, response_id: str) -> Claim | web.StreamResponse:
        """Whose it is; an answer to an edge that has the wrong address. Raises KvloomError (NOT_FOUND, INTERNAL)."""
        tag = tag_of(response_id)
        if not tag:
            raise not_kept()
        wanted_tag = request.headers.get(RELAYED)
        if wanted_tag is not None:
            if wanted_tag != self._tag or self._has_left:
                return web.Response(status=MISDIRECTED)  # the edge that is meant is gone, or as good as gone
            return Claim(self._tag, tag)
        try:
            return await self._claims.find(response_id) or Claim(tag, tag)
        except RedisError as error:
            raise _cannot_look() from error

    async def _pass_on(self, request: web.BaseRequest, response_id: str, claim: Claim) -> web.StreamResponse:
        """Raises KvloomError (NOT_FOUND, INTERNAL), OwnerLostError."""
        try:
            record = await self._journal.find_edge(claim.holder, self._tag)
        except (RedisError, EdgesUnknownError) as error:
            raise _cannot_look() from error
        if record is None:
            raise not_kept()
        return await self._relay.pass_on(request, record.address, claim.holder, response_id)

    # -- when it has died ---------------------------------------------------------------------------------------------

    async def _taken(self, response_id: str, caller: bytes) -> ResumableStream:
        """This edge has it, or is about to. Raises KvloomError (NOT_FOUND, DRAINING)."""
        task = self._taking.get(response_id)
        if task is not None:
            with contextlib.suppress(KvloomError, RedisError):
                await asyncio.shield(task)
        stream = self._edge.resume.find(response_id, caller)
        if stream is None:
            raise self._missing()
        return stream

    def _missing(self) -> KvloomError:
        """What this edge should have, it has not."""
        return stopping() if self._has_left else not_kept()

    async def _go_on(
        self, request: web.BaseRequest, response_id: str, claim: Claim, caller: bytes, after: int
    ) -> Found | None:
        """None: another edge was faster."""
        try:
            row, source = await self._row(response_id, claim)
            if row is None:
                raise not_kept()
            response = decode_response(row.response)
            if not hmac.compare_digest(response.caller, caller):
                raise not_kept()
            if row.snapshot is None:
                return await self._replay(request, response, await self._state(source, response, row), after)
            stream = self._edge.resume.find(response_id, caller)
            if stream is not None:  # for another client, meanwhile
                return stream
            task = self._taking.get(response_id)
            if task is None:
                job = self._take(response_id, claim, source, after)
                task = asyncio.create_task(job, name=f"take over {response_id}")
                self._taking[response_id] = task
                task.add_done_callback(lambda _: self._taking.pop(response_id, None))
            taken = await asyncio.shield(task)
        except RedisError as error:
            raise _cannot_look() from error
        if isinstance(taken, AnswerState):
            return await self._replay(request, response, taken, after)
        return taken

    async def _take(
        self, response_id: str, claim: Claim, source: str, after: int
    ) -> ResumableStream | AnswerState | None:
        """The stream that goes on here now; what there is of an answer that has ended; None: another edge was faster.
        `source`: the tag of the edge that wrote it. Raises KvloomError (EVENTS_GONE, QUEUE_FULL, DRAINING),
        RedisError."""
        with self._edge.admitted() as place:
            wanted = Claim(self._tag, source)
            before = None if claim.holder == tag_of(response_id) == claim.source else claim
            now = await self._claims.claim(response_id, before, wanted, claim.holder)
            if now != wanted:
                return None
            row, source = await self._row(response_id, claim)
            if row is None:
                raise not_kept()
            response = decode_response(row.response)
            state = await self._state(source, response, row)
            if state.ended or row.snapshot is None:
                return state
            if row.requests is None or not state.is_whole or after > state.num_events:
                await self._claims.drop(response_id, wanted)
                raise _rest_is_lost()
            link_ids = await self._journal.link_ids({source, claim.holder})
            stream = take_over(self._edge, place, response, decode_requests(row.requests), state, link_ids)
            self._edge.metrics.on_taken_over()
            log.info("a response goes on here", response_id=response_id, num_events=state.num_events)
            return stream

    async def _row(self, response_id: str, claim: Claim) -> tuple[ResponseRow | None, str]:
        """And the tag of the edge that wrote it. One that took the response over may not have got so far."""
        row = await self._journal.read_response(claim.holder, response_id)
        if row is not None or claim.source == claim.holder:
            return row, claim.holder
        return await self._journal.read_response(claim.source, response_id), claim.source

    async def _state(self, tag: str, response: ResponseRecord, row: ResponseRow) -> AnswerState:
        state = AnswerState(len(response.prompt_sizes) * response.n, len(response.prompt_sizes))
        journal = await self._lost.news_of(tag, response.number)
        state.take_all(None if row.snapshot is None else decode_news(row.snapshot), journal)
        return state

    async def _replay(
        self, request: web.BaseRequest, response: ResponseRecord, state: AnswerState, after: int
    ) -> web.StreamResponse:
        """Of an answer that has ended."""
        num_before = state.num_events - len(state.events)
        if not state.ended:
            raise not_kept() if not state.num_events else _rest_is_lost()
        if after >= state.num_events:
            return web.Response(status=204)
        if after < num_before:
            message = f"Events {after + 1} to {num_before} of this response are no longer kept."
            raise KvloomError(ErrorReason.ERROR_REASON_EVENTS_GONE, message)
        shape = shape_of(response, self._edge.find_model(response.model))
        framed = framed_events(after + 1, state.events[after - num_before :], shape.prefixes, shape.suffix)
        events = EventStream(request, self._edge.config.max_buffered_bytes, self._edge.corks)
        events.begin({REQUEST_ID: request_id(request), RESPONSE_ID: response.id})
        await _write(events, request, framed)
        events.end()
        return events.response()


async def _write(events: EventStream, request: web.BaseRequest, missed: Sequence[bytes]) -> None:
    """Raises ConnectionResetError for a reader that does not take them."""
    begin = size_bytes = 0
    for end, event in enumerate(missed, 1):
        size_bytes += len(event)
        if size_bytes < CATCH_UP_BYTES and end < len(missed):
            continue
        events.write_all_framed(missed[begin:end])
        begin, size_bytes = end, 0
        try:
            async with asyncio.timeout(CATCH_UP_SECONDS):
                await request.writer.drain()
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client reads too slowly") from error


def _rest_is_lost() -> KvloomError:
    message = "The server that was writing this answer has gone, and too little is known of it to go on from there."
    return KvloomError(ErrorReason.ERROR_REASON_EVENTS_GONE, message)


def _cannot_look() -> KvloomError:
    message = "Where this response is cannot be looked up now."
    return KvloomError(ErrorReason.ERROR_REASON_INTERNAL, message, retry_after_seconds=1.0)
