"""Reads a JSON body within the limits on its size, on its duration and on the memory of all bodies together."""

from __future__ import annotations

import asyncio
from typing import Final

import xxhash
from aiohttp import web

from kvloom.config import EdgeConfig
from kvloom.errors import KvloomError, invalid_argument, request_timeout
from kvloom.v1.error_reason_pb2 import ErrorReason

RETRY_SECONDS: Final = 2.0


class BodyBudget:
    """Limits the bytes of bodies that have been received but not processed yet. Bytes count when they arrive, so that a
    client that announces a large body and sends little does not use up the budget."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self.num_leases = 0

    def lease(self) -> BodyLease:
        self.num_leases += 1
        return BodyLease(self)

    def take(self, num_bytes: int) -> None:
        """Raises KvloomError (OVERLOADED)."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise KvloomError(
                ErrorReason.ERROR_REASON_OVERLOADED,
                "This server is receiving too many large requests.",
                retry_after_seconds=RETRY_SECONDS,
            )
        self.num_bytes += num_bytes


class BodyLease:
    """One body's part of the budget. The end of the `with` block releases it."""

    __slots__ = ("_budget", "num_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def __enter__(self) -> BodyLease:
        return self

    def __exit__(self, *_fault: object) -> None:
        self._budget.num_leases -= 1
        self._budget.num_bytes -= self.num_bytes

    def take(self, num_bytes: int) -> None:
        """Raises KvloomError (OVERLOADED)."""
        self._budget.take(num_bytes)
        self.num_bytes += num_bytes


async def read_json_body(request: web.BaseRequest, config: EdgeConfig, lease: BodyLease) -> bytes:
    """Return the raw bytes. Raises KvloomError (UNSUPPORTED_MEDIA_TYPE, REQUEST_TOO_LARGE, REQUEST_TIMEOUT, OVERLOADED,
    INVALID_ARGUMENT)."""
    _check_headers(request)
    length = request.content_length
    if length is not None and length > config.max_body_bytes:
        raise _too_large(config.max_body_bytes)
    expected = request.headers.get("Expect")
    if expected is not None and expected.lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        if request.content.is_eof():  # most bodies arrive with their head and need no timer
            return _taken(request.content.read_nowait(), config, lease)
        chunks: list[bytes] = []
        async with asyncio.timeout(config.body_timeout_seconds):
            while chunk := await request.content.readany():
                chunks.append(_taken(chunk, config, lease))
    except TimeoutError as error:
        raise request_timeout(f"The body did not arrive within {config.body_timeout_seconds:g} s.") from error
    except web.RequestPayloadError as error:
        raise invalid_argument("The body is not framed as its headers say.") from error
    return b"".join(chunks)


def _taken(chunk: bytes, config: EdgeConfig, lease: BodyLease) -> bytes:
    """Count the chunk against the limits and return it. Raises KvloomError (REQUEST_TOO_LARGE, OVERLOADED)."""
    if lease.num_bytes + len(chunk) > config.max_body_bytes:
        raise _too_large(config.max_body_bytes)
    lease.take(len(chunk))
    return chunk


def digest_of(raw: bytes) -> str:
    """Return a digest that distinguishes the bodies of one client."""
    return xxhash.xxh3_128_hexdigest(raw)


def _check_headers(request: web.BaseRequest) -> None:
    headers = request.headers
    if headers.get("Content-Type") != "application/json":  # the common value needs no parsing
        if request.content_type != "application/json" or "Content-Type" not in headers:
            raise _unsupported_media("The body must be sent with Content-Type: application/json.")
        if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
            raise _unsupported_media("The body must be UTF-8.")
    encoding = headers.get("Content-Encoding")
    if encoding is not None and encoding.lower() != "identity":
        raise _unsupported_media("The body must not be compressed.")


def _unsupported_media(message: str) -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_UNSUPPORTED_MEDIA_TYPE, message)


def _too_large(max_bytes: int) -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, f"The body is larger than {max_bytes} bytes.")
