"""Files and images that requests name by URLs are fetched from origins that the operator allows, and from no others."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from typing import Final, Self

import aiohttp

from kvloom.errors import KvloomError, invalid_argument, unsupported
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.transport.public_addresses import public_socket, split_url

FETCH_SECONDS: Final = 5.0
"""For everything, from the resolution of the name to the last byte."""
REQUEST_SECONDS: Final = 20.0
"""For all URLs of a request together, since they are fetched one after another."""
MAX_FETCHES: Final = 32
"""At a time, of one edge."""
TURN_SECONDS: Final = 2.0
"""How long a fetch waits while there are so many others."""
RETRY_SECONDS: Final = 1.0
ANY_ORIGIN: Final = "https://*"


class UrlFetcher:
    """Follows no redirects, and uses no proxy. By https it connects to public addresses only, whatever a name resolves
    to. Origins with http are of the operator's own network."""

    def __init__(
        self, origins: Sequence[str], max_fetches: int = MAX_FETCHES, turn_seconds: float = TURN_SECONDS
    ) -> None:
        self._origins = frozenset(origins)
        self._turns = asyncio.Semaphore(max_fetches)
        self._turn_seconds = turn_seconds
        self._until = math.inf
        """When the request's time for its URLs ends, by the event loop's clock."""

    def of_request(self, seconds: float = REQUEST_SECONDS) -> Self:
        """A fetcher for the URLs of one request, which have so many seconds together from now on."""
        of_request = copy.copy(self)
        of_request._until = asyncio.get_running_loop().time() + seconds
        return of_request

    async def fetch(self, url: str, at: str, max_bytes: int) -> tuple[bytes, str]:
        """The content, and the type that the server says. `at`: the field that has the URL, which errors name. Raises
        KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER, REQUEST_TOO_LARGE, OVERLOADED)."""
        is_private = self._check(url, at)
        await self._take_turn(at)
        try:
            now = asyncio.get_running_loop().time()
            async with asyncio.timeout_at(min(now + FETCH_SECONDS, self._until)):
                return await _content(url, at, max_bytes, is_private=is_private)
        except TimeoutError as error:
            limits = f"{FETCH_SECONDS:g} s, or all of the request within {REQUEST_SECONDS:g} s"
            raise invalid_argument(f"{at}: the URL has not answered within {limits}.", at) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            message = f"{at}: the URL cannot be reached ({type(error).__name__})."
            raise invalid_argument(message, at) from error
        finally:
            self._turns.release()

    async def _take_turn(self, at: str) -> None:
        """Raises KvloomError (OVERLOADED): that others are slow is not the fault of this URL."""
        try:
            async with asyncio.timeout(self._turn_seconds):
                await self._turns.acquire()
        except TimeoutError as error:
            message = f"{at}: too many URLs are fetched at the moment."
            raise KvloomError(
                ErrorReason.ERROR_REASON_OVERLOADED, message, field=at, retry_after_seconds=RETRY_SECONDS
            ) from error

    def _check(self, url: str, at: str) -> bool:
        """True for an origin that need not have a public address."""
        if not self._origins:
            message = (
                f"{at}: nothing is fetched from URLs here (edge.fetch_origins). Upload the file, or send its content."
            )
            raise unsupported(message, at)
        try:
            parts = split_url(url)
        except ValueError as error:
            raise invalid_argument(f"{at}: the URL cannot be used: {error}.", at) from error
        origin = f"{parts.scheme}://{parts.netloc.lower()}"
        if origin in self._origins:
            return parts.scheme == "http"
        if parts.scheme == "https" and ANY_ORIGIN in self._origins:
            return False
        raise unsupported(f"{at}: {origin} is no origin from which files are fetched (edge.fetch_origins).", at)


async def _content(url: str, at: str, max_bytes: int, *, is_private: bool) -> tuple[bytes, str]:
    """Raises KvloomError, aiohttp.ClientError, OSError and ValueError."""
    connector = aiohttp.TCPConnector(force_close=True, socket_factory=None if is_private else public_socket)
    headers = {"User-Agent": "kvloom", "Accept-Encoding": "identity"}
    async with (
        aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False) as http,
        http.get(url, headers=headers, allow_redirects=False) as answer,
    ):
        if answer.status != 200:
            raise invalid_argument(f"{at}: the URL has answered with status {answer.status}.", at)
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise invalid_argument(f"{at}: the URL has answered with a compressed content.", at)
        pieces, num_bytes = list[bytes](), 0
        async for piece in answer.content.iter_any():
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                message = f"{at}: the URL has more than {max_bytes} bytes."
                raise KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, message, field=at)
            pieces.append(piece)
        return b"".join(pieces), answer.content_type
