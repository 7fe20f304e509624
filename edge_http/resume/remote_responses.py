"""The responses of the other edges, as the endpoints see them; edge_http/recovery/ implements it."""

from __future__ import annotations

from typing import Protocol

from aiohttp import web

from edge_http.resume.idempotent_answers import IdempotentAnswer
from edge_http.resume.response_name import ResponseName
from edge_http.resume.resumable_stream import ResumableStream
from edge_http.resume.table import not_kept

FoundResponse = web.StreamResponse | ResumableStream | IdempotentAnswer
"""Either what another edge answered or left behind, or a stream that continues at this edge now, or an answer that is
not streamed and that this edge has after all."""


class RemoteResponses(Protocol):
    async def find(self, request: web.BaseRequest, response_id: str, caller: bytes, after: int) -> FoundResponse:
        """The events of a response after number `after`. Raises KvloomError (NOT_FOUND, EVENTS_GONE, QUEUE_FULL,
        DRAINING, RESPONSE_UNAVAILABLE) as long as nothing was sent."""
        ...

    async def find_by_key(self, request: web.BaseRequest, name: ResponseName, after: int) -> FoundResponse | None:
        """The response that another edge began under the same idempotency key. None: from now on the key stands for
        `name`. Raises KvloomError."""
        ...

    async def cancel(self, request: web.BaseRequest, response_id: str) -> web.StreamResponse:
        """Raises KvloomError (NOT_FOUND, DRAINING, RESPONSE_UNAVAILABLE)."""
        ...


class NoRemoteResponses:
    """This edge shares its responses with no others."""

    async def find(self, request: web.BaseRequest, response_id: str, caller: bytes, after: int) -> FoundResponse:  # noqa: ARG002
        raise not_kept()

    async def find_by_key(self, request: web.BaseRequest, name: ResponseName, after: int) -> FoundResponse | None:  # noqa: ARG002
        if after:
            raise not_kept()
        return None

    async def cancel(self, request: web.BaseRequest, response_id: str) -> web.StreamResponse:  # noqa: ARG002
        raise not_kept()
