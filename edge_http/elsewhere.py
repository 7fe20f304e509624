"""Responses that another edge began: passed on to it while it lives, replayed from its journal when it has died."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

import structlog
from aiohttp import web
from redis.exceptions import RedisError

from edge_http.headers import REQUEST_ID, RESPONSE_ID, request_id
from edge_http.relay import MISDIRECTED, RELAYED, OwnerLostError, Relay
from edge_http.resumable import CATCH_UP_BYTES, CATCH_UP_SECONDS, LINGER_SECONDS
from edge_http.resume_journal import EdgeRecord, EdgesUnknownError, JournalEntry, ResumeJournal, tag_of
from edge_http.resume_table import not_kept
from edge_http.shapes import encode_json
from edge_http.sse import EventStream, split_framed
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

log = structlog.get_logger()

LOST_EDGE_SECONDS: Final = 5.0
"""A dead edge's journal is read once for all clients that come back within this time."""
MAX_LOST_EDGES: Final = 4

Journal = Mapping[str, Sequence[JournalEntry]]


class Elsewhere:
    """The way to the responses of the other edges. `tag` is this edge's own."""

    def __init__(self, journal: ResumeJournal, relay: Relay, tag: str, max_buffered_bytes: int) -> None:
        self._journal = journal
        self._relay = relay
        self._tag = tag
        self._max_buffered_bytes = max_buffered_bytes
        self._lost: OrderedDict[str, tuple[float, Journal]] = OrderedDict()
        self._reading = asyncio.Lock()

    async def resume(self, request: web.BaseRequest, response_id: str, caller: bytes, after: int) -> web.StreamResponse:
        """Raises KvloomError (NOT_FOUND, EVENTS_GONE, INTERNAL) as long as nothing was sent."""
        try:
            return await self._pass_on(request, response_id)
        except OwnerLostError as lost:
            log.info("the edge of a response is gone", response_id=response_id, error=str(lost))
        return await self._replay(request, response_id, caller, after)

    async def cancel(self, request: web.BaseRequest, response_id: str) -> web.StreamResponse:
        """Raises KvloomError (NOT_FOUND, INTERNAL)."""
        try:
            return await self._pass_on(request, response_id)
        except OwnerLostError as lost:
            raise not_kept() from lost  # what a dead edge ran has been cancelled by the router

    async def _pass_on(self, request: web.BaseRequest, response_id: str) -> web.StreamResponse:
        """Let the edge that began the response answer. Raises KvloomError (NOT_FOUND, INTERNAL), OwnerLostError."""
        tag = tag_of(response_id)
        if not tag or tag == self._tag:
            raise not_kept()
        if RELAYED in request.headers:
            return web.Response(status=MISDIRECTED)  # this edge has the address of one that is gone
        try:
            record: EdgeRecord | None = await self._journal.find_edge(tag, self._tag)
        except (RedisError, EdgesUnknownError) as error:
            raise _cannot_look() from error
        if record is None:
            raise not_kept()
        return await self._relay.pass_on(request, record.address)

    async def close(self) -> None:
        await self._relay.close()

    async def _replay(
        self, request: web.BaseRequest, response_id: str, caller: bytes, after: int
    ) -> web.StreamResponse:
        try:
            journal = await self._journal_of(tag_of(response_id))
        except RedisError as error:
            raise _cannot_look() from error
        entries = journal.get(response_id, ())
        if not entries or not hmac.compare_digest(entries[0].caller, caller):
            raise not_kept()
        missed, ended = missed_events(entries, after)
        if not missed:
            if ended:
                return web.Response(status=204)
            raise _rest_is_lost()
        events = EventStream(request, self._max_buffered_bytes)
        events.begin({REQUEST_ID: request_id(request), RESPONSE_ID: response_id})
        await _write(events, request, missed)
        if ended:
            events.end()
        else:
            events.break_off(encode_json(_rest_is_lost().to_openai()), LINGER_SECONDS)
        return events.response()

    async def _journal_of(self, tag: str) -> Journal:
        async with self._reading:
            known = self._lost.get(tag)
            if known is not None and time.monotonic() - known[0] < LOST_EDGE_SECONDS:
                return known[1]
            journal = await self._journal.read(tag)
            self._lost[tag] = (time.monotonic(), journal)
            self._lost.move_to_end(tag)
            if len(self._lost) > MAX_LOST_EDGES:
                self._lost.popitem(last=False)
            asyncio.get_running_loop().call_later(LOST_EDGE_SECONDS, self._forget, tag, journal)
            return journal

    def _forget(self, tag: str, journal: Journal) -> None:
        known = self._lost.get(tag)
        if known is not None and known[1] is journal:
            del self._lost[tag]


def missed_events(entries: Sequence[JournalEntry], after: int) -> tuple[list[bytes], bool]:
    """The events behind number `after`, and whether the answer ended with the last of them. Entries may overlap, for
    what Redis took without saying so was written again. Raises KvloomError (EVENTS_GONE)."""
    missed: list[bytes] = []
    position = after
    ended = False
    for entry in entries:
        last_number = entry.first_number + entry.num_events - 1
        if entry.first_number > position + 1:
            message = f"Events {position + 1} to {entry.first_number - 1} of this response are no longer kept."
            raise KvloomError(ErrorReason.ERROR_REASON_EVENTS_GONE, message)
        if last_number > position:
            missed += split_framed(entry.framed)[position + 1 - entry.first_number :]
            position = last_number
        ended = entry.ended and last_number == position
    return missed, ended


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
    message = "The server that was writing this answer has gone, and the rest of the answer with it."
    return KvloomError(ErrorReason.ERROR_REASON_EVENTS_GONE, message)


def _cannot_look() -> KvloomError:
    message = "Where this response is cannot be looked up now."
    return KvloomError(ErrorReason.ERROR_REASON_INTERNAL, message, retry_after_seconds=1.0)
