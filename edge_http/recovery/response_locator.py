"""Finds the responses of other edges: a request is forwarded to the edge that holds the response, or, if that edge has
died, the response is recovered from its journal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import structlog
from aiohttp import web
from redis.exceptions import RedisError

from edge_http.admission import draining_error
from edge_http.edge import Edge
from edge_http.recovery.claims import Claim, KeyedResponse, ResumeClaims
from edge_http.recovery.journal import EdgesUnknownError, ResumeJournal
from edge_http.recovery.peer_proxy import MISDIRECTED, OwnerLostError, PeerProxy
from edge_http.recovery.response_recovery import ResponseRecovery
from edge_http.resume.remote_responses import FoundResponse
from edge_http.resume.response_name import ResponseName, edge_tag_of
from edge_http.resume.resumable_stream import ResumableStream
from edge_http.resume.table import not_kept, other_request
from edge_http.wire.headers import RELAYED
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

log = structlog.get_logger()

MAX_HOPS: Final = 4
"""How many edges may hold a response, one after the other, while a client waits."""


class ResponseLocator:
    """Implements RemoteResponses (edge_http/resume/remote_responses.py) for edges that share a Redis."""

    def __init__(self, edge: Edge, journal: ResumeJournal, claims: ResumeClaims, proxy: PeerProxy) -> None:
        self._edge = edge
        self._journal = journal
        self._claims = claims
        self._proxy = proxy
        self._tag = edge.tag
        self._has_left = False
        self._recovery = ResponseRecovery(edge, journal, claims)
        self._naming: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}
        """By caller and idempotency key: a lock for the requests that look it up, and how many of them there are."""

    async def find(self, request: web.BaseRequest, response_id: str, caller: bytes, after: int) -> FoundResponse:
        """See RemoteResponses. The result is the answer of the edge that holds the response, or a replay from the
        journal of a dead edge, or a stream that continues at this edge now."""
        for _ in range(MAX_HOPS):
            claim = await self._holder(request, response_id)
            if isinstance(claim, web.StreamResponse):
                return claim
            if claim.holder == self._tag:
                before = self._recovery.claim_before(response_id)
                if before is None:
                    return await self._find_claimed(response_id, caller)
                claim = before
            else:
                try:
                    return await self._forward(request, response_id, claim)
                except OwnerLostError as lost:
                    log.info("response_edge_lost", response_id=response_id, error=str(lost))
            try:
                found = await self._recovery.recover(request, response_id, claim, caller, after)
            except RedisError as error:
                raise _cannot_look() from error
            if found is not None:
                return found
        raise _cannot_look()

    async def cancel(self, request: web.BaseRequest, response_id: str) -> web.StreamResponse:
        """See RemoteResponses."""
        claim = await self._holder(request, response_id)
        if isinstance(claim, web.StreamResponse):
            return claim
        if claim.holder == self._tag:
            raise self._missing()
        try:
            return await self._forward(request, response_id, claim)
        except OwnerLostError as lost:
            raise not_kept() from lost  # the router has cancelled the requests of a dead edge

    async def find_by_key(self, request: web.BaseRequest, name: ResponseName, after: int) -> FoundResponse | None:
        """See RemoteResponses. While Redis is unreachable, a key is known to one edge only."""
        before: KeyedResponse | None = None
        for _ in range(MAX_HOPS):
            async with self._key_lock(name.tenant, name.idempotency_key):
                own = self._edge.find_by_key(name.tenant, name.idempotency_key)
                if own is not None and own.name.body_digest == name.body_digest:
                    return own
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
            before = now  # that response was refused, cancelled, or forgotten
        raise _cannot_look()

    async def _named(self, name: ResponseName, before: KeyedResponse | None) -> KeyedResponse:
        """The response that the key of `name` stands for now."""
        wanted = KeyedResponse(name.id, name.body_digest)
        try:
            return await self._claims.name(name.tenant, name.idempotency_key, before, wanted, self._key_seconds)
        except RedisError as error:
            log.info("idempotency_lookup_failed", error=str(error))
            return wanted

    async def _find_named(self, request: web.BaseRequest, response_id: str, caller: bytes, after: int) -> FoundResponse:
        own = self._edge.resume.find(response_id, caller) or self._edge.idempotent_answers.find(response_id, caller)
        return own or await self.find(request, response_id, caller, after)

    @property
    def _key_seconds(self) -> float:
        resume = self._edge.resume_config
        return self._edge.request_timeout_seconds + max(2 * resume.grace_seconds, resume.idempotency_seconds)

    @contextlib.asynccontextmanager
    async def _key_lock(self, tenant: str, key: str) -> AsyncIterator[None]:
        """Serializes the requests of a key, until the response is open or found."""
        lock, count = self._naming.get((tenant, key), (asyncio.Lock(), 0))
        self._naming[tenant, key] = (lock, count + 1)
        try:
            async with lock:
                yield
        finally:
            lock, count = self._naming.pop((tenant, key))
            if count > 1:
                self._naming[tenant, key] = (lock, count - 1)

    def leave(self) -> None:
        """This edge stops: other edges may continue the responses that it does not have or no longer has."""
        self._has_left = True

    async def close(self) -> None:
        await self._recovery.close()
        await self._proxy.close()

    # -- the holder ---------------------------------------------------------------------------------------------------

    async def _holder(self, request: web.BaseRequest, response_id: str) -> Claim | web.StreamResponse:
        """Returns the claim on a response, or the answer to an edge that forwarded to a wrong address. Raises
        KvloomError (NOT_FOUND, RESPONSE_UNAVAILABLE)."""
        tag = edge_tag_of(response_id)
        if not tag:
            raise not_kept()
        wanted_tag = request.headers.get(RELAYED)
        if wanted_tag is not None:
            if wanted_tag != self._tag or self._has_left:
                return web.Response(status=MISDIRECTED)  # the intended edge is gone, or about to be
            return Claim(self._tag, tag)
        try:
            return await self._claims.find(response_id) or Claim(tag, tag)
        except RedisError as error:
            raise _cannot_look() from error

    async def _forward(self, request: web.BaseRequest, response_id: str, claim: Claim) -> web.StreamResponse:
        """Raises KvloomError (NOT_FOUND, RESPONSE_UNAVAILABLE), OwnerLostError."""
        try:
            record = await self._journal.find_edge(claim.holder, self._tag)
        except (RedisError, EdgesUnknownError) as error:
            raise _cannot_look() from error
        if record is None:
            raise not_kept()
        return await self._proxy.forward(request, record.address, claim.holder, response_id)

    async def _find_claimed(self, response_id: str, caller: bytes) -> ResumableStream:
        """The stream of a response that this edge has claimed. Raises KvloomError (NOT_FOUND, DRAINING)."""
        stream = await self._recovery.find_claimed(response_id, caller)
        if stream is None:
            raise self._missing()
        return stream

    def _missing(self) -> KvloomError:
        """The error for a response that this edge should have but does not."""
        return draining_error() if self._has_left else not_kept()


def _cannot_look() -> KvloomError:
    message = "Where this response is cannot be looked up now."
    return KvloomError(ErrorReason.ERROR_REASON_RESPONSE_UNAVAILABLE, message, retry_after_seconds=1.0)
