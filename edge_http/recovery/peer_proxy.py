"""Forwards a request to another edge, and streams its answer back as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
from aiohttp import web

from edge_http.resume.table import not_kept
from edge_http.wire.headers import DROPPED_REASON, LAST_EVENT_ID, RELAYED, REPLAYED
from edge_http.wire.request_callers import relayed_caller, relayed_certificate
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust

MISDIRECTED: Final = 421
"""The status of an edge that is not the intended one, or that has left its answers to other edges."""
CONNECT_SECONDS: Final = 2.0
ANSWER_SECONDS: Final = 5.0
"""The wait for a status line. An edge has it ready unless the answer has not begun; then the edge is probed."""
PROBE_SECONDS: Final = 1.0
_TO_OWNER: Final = (LAST_EVENT_ID, "x-request-id", "traceparent")
_TO_CLIENT: Final = (
    "Content-Type",
    "Cache-Control",
    "X-Accel-Buffering",
    "x-request-id",
    "Retry-After",
    "openai-processing-ms",
    DROPPED_REASON,
)
_OURS: Final = "x-kvloom-"


class OwnerLostError(Exception):
    """The other edge does not answer. Nothing was sent to the client."""


class PeerProxy:
    """Connections to the other edges."""

    def __init__(self, max_connections: int, caller_headers: Sequence[str], trust: FabricTrust = NO_SECRET) -> None:
        """`caller_headers`: those by which callers are told apart."""
        self._to_owner = (*_TO_OWNER, *caller_headers)
        self._trust = trust
        self._scheme = "https" if trust.has_secret else "http"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
        )

    async def forward(self, request: web.BaseRequest, address: str, tag: str, response_id: str) -> web.StreamResponse:
        """Raises OwnerLostError, KvloomError (NOT_FOUND). If the other edge dies in the middle of its answer, the
        client's connection is closed, so that the client comes back and another edge answers."""
        headers = {name: request.headers[name] for name in self._to_owner if name in request.headers} | {RELAYED: tag}
        headers |= {**relayed_certificate(request, self._trust), **relayed_caller(request)}
        path = str(request.rel_url)
        if request.method == "POST" and not path.endswith("/cancel"):  # a request repeated under its idempotency key
            path, method = f"{request.path}/{response_id}?stream=true", "GET"
            more = {REPLAYED: "true"}
        else:
            method, more = request.method, {}
        try:
            tls = self._tls()
        except OSError as error:  # too many open files
            raise OwnerLostError(str(error)) from error
        url = f"{self._scheme}://{address}{path}"
        sent = asyncio.ensure_future(self._session.request(method, url, headers=headers, allow_redirects=False, **tls))
        try:
            while not sent.done():
                await asyncio.wait([sent], timeout=ANSWER_SECONDS)
                if not sent.done():
                    await self._probe(address)
            answer = sent.result()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise OwnerLostError(str(error)) from error
        finally:
            sent.cancel()
        async with answer:
            if answer.status == MISDIRECTED:
                raise OwnerLostError("another edge has its address, or it is stopping")
            if answer.status == 404:
                raise not_kept()
            return await _copy(answer, request, more)

    async def _probe(self, address: str) -> None:
        """Raises ClientError, TimeoutError."""
        url = f"{self._scheme}://{address}/live"
        async with asyncio.timeout(PROBE_SECONDS), self._session.get(url, **self._tls()) as answer:
            await answer.read()

    def _tls(self) -> dict[str, Any]:
        """The arguments that make a connection prove that both edges belong to the fabric."""
        context = self._trust.client_tls()
        return {} if context is None else {"ssl": context, "server_hostname": self._trust.server_hostname("edge")}

    async def close(self) -> None:
        await self._session.close()


async def _copy(
    answer: aiohttp.ClientResponse, request: web.BaseRequest, more_headers: Mapping[str, str]
) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=more_headers if answer.status == 200 else None)
    for name, value in answer.headers.items():
        if name.lower().startswith(_OURS) or name in _TO_CLIENT:
            response.headers[name] = value
    if answer.status != 204:
        response.content_length = answer.content_length
    await response.prepare(request)
    try:
        while piece := await answer.content.readany():
            await response.write(piece)
    except aiohttp.ClientError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the other edge is gone") from error
    await response.write_eof()
    return response
