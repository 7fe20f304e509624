"""Reads a JSON body within its limits."""

from __future__ import annotations

import asyncio
from typing import Final

import xxhash
from aiohttp import web

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason

BODY_TIMEOUT_SECONDS: Final = 60.0


async def read_json_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """The raw bytes. Raises KvloomError (UNSUPPORTED_MEDIA_TYPE, REQUEST_TOO_LARGE, INVALID_ARGUMENT)."""
    _check_headers(request)
    length = request.content_length
    if length is not None and length > max_bytes:
        raise _too_large(max_bytes)
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    chunks: list[bytes] = []
    size_bytes = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            while chunk := await request.content.readany():
                size_bytes += len(chunk)
                if size_bytes > max_bytes:
                    raise _too_large(max_bytes)
                chunks.append(chunk)
    except TimeoutError as error:
        raise invalid_argument(f"The body did not arrive within {BODY_TIMEOUT_SECONDS:g} s.") from error
    except web.RequestPayloadError as error:
        raise invalid_argument("The body is not framed as its headers say.") from error
    return b"".join(chunks)


def digest_of(raw: bytes) -> str:
    """Tells bodies of one client apart."""
    return xxhash.xxh3_128_hexdigest(raw)


def _check_headers(request: web.BaseRequest) -> None:
    if request.content_type != "application/json" or "Content-Type" not in request.headers:
        raise _unsupported_media("The body must be sent with Content-Type: application/json.")
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise _unsupported_media("The body must be UTF-8.")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _unsupported_media("The body must not be compressed.")


def _unsupported_media(message: str) -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_UNSUPPORTED_MEDIA_TYPE, message)


def _too_large(max_bytes: int) -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, f"The body is larger than {max_bytes} bytes.")
