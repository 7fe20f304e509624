"""Passes a request on to another edge, and its answer back as it comes."""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp
from aiohttp import web

from edge_http.resume.table import not_kept
from edge_http.wire.headers import LAST_EVENT_ID

RELAYED: Final = "x-kvloom-relayed"
"""The tag of the edge that is meant."""
MISDIRECTED: Final = 421
"""The status with which an edge says that it is not the one that was looked for, or has left its answers to others."""
CONNECT_SECONDS: Final = 2.0
ANSWER_SECONDS: Final = 5.0
"""Until the status line. An edge has it ready, unless the answer has not begun: then it has to say that it lives."""
LIVES_SECONDS: Final = 1.0
_TO_OWNER: Final = ("Authorization", LAST_EVENT_ID, "x-request-id", "traceparent")
_TO_CLIENT: Final = ("Content-Type", "Cache-Control", "X-Accel-Buffering", "x-request-id", "Retry-After")
_OURS: Final = "x-kvloom-"


class OwnerLostError(Exception):
    """The other edge does not answer; nothing was sent to the client."""


class PeerProxy:
    """Connections to the other edges."""

    def __init__(self, max_connections: int) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
        )

    async def pass_on(self, request: web.BaseRequest, address: str, tag: str, response_id: str) -> web.StreamResponse:
        """Raises OwnerLostError, KvloomError (NOT_FOUND). When the other edge dies in the middle, the client's
        connection is closed: it will come back, and be answered by somebody else."""
        headers = {name: request.headers[name] for name in _TO_OWNER if name in request.headers} | {RELAYED: tag}
        path = str(request.rel_url)
        if request.method == "POST" and not path.endswith("/cancel"):  # again, with its idempotency key
            path, method = f"{request.path}/{response_id}?stream=true", "GET"
        else:
            method = request.method
        asked = asyncio.ensure_future(
            self._session.request(method, f"http://{address}{path}", headers=headers, allow_redirects=False)
        )
        try:
            while not asked.done():
                await asyncio.wait([asked], timeout=ANSWER_SECONDS)
                if not asked.done():
                    await self._check_lives(address)
            answer = asked.result()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise OwnerLostError(str(error)) from error
        finally:
            asked.cancel()
        async with answer:
            if answer.status == MISDIRECTED:
                raise OwnerLostError("another edge has its address, or it stops")
            if answer.status == 404:
                raise not_kept()
            return await _copy(answer, request)

    async def _check_lives(self, address: str) -> None:
        """Raises ClientError, TimeoutError."""
        async with asyncio.timeout(LIVES_SECONDS), self._session.get(f"http://{address}/live") as answer:
            await answer.read()

    async def close(self) -> None:
        await self._session.close()


async def _copy(answer: aiohttp.ClientResponse, request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status)
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
