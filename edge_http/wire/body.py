"""Reads a JSON body within the limits on its size, on its duration and on the memory of all bodies together."""

from __future__ import annotations

import asyncio

import xxhash
from aiohttp import web

from kvloom.errors import KvloomError, invalid_argument, request_timeout
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import EdgeConfig
from kvloom_common.limits.byte_budget import ByteLease


async def read_json_body(request: web.BaseRequest, config: EdgeConfig, lease: ByteLease) -> bytes:
    """Return the raw bytes. Raises KvloomError (UNSUPPORTED_MEDIA_TYPE, REQUEST_TOO_LARGE, REQUEST_TIMEOUT, OVERLOADED,
    RATE_LIMITED, INVALID_ARGUMENT)."""
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


def _taken(chunk: bytes, config: EdgeConfig, lease: ByteLease) -> bytes:
    """Count the chunk against the limits and return it. Raises KvloomError (REQUEST_TOO_LARGE, OVERLOADED,
    RATE_LIMITED)."""
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
