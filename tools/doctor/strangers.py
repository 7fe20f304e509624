"""Attempts of a stranger, who has neither key nor certificate, to be served at an address, with what each shows.

An attempt counts as refused only if the server said so. Where nothing answers, or an answer means neither, it is
unknown whether strangers are served: a broken connection must not pass as a closed door.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine
from typing import Final, Literal, NamedTuple
from urllib.parse import urlsplit

from kvloom_common.addresses import split_address, url_host

TIMEOUT_SECONDS: Final = 5.0
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""With which every client of HTTP/2 begins: the preface and empty settings."""


class StrangerAttempt(NamedTuple):
    """One attempt, and what came of it."""

    outcome: Literal["served", "refused", "unknown"]
    detail: str
    """Says what the stranger met."""


_CLOSED: Final = StrangerAttempt("unknown", "the connection was closed without an answer")


async def attempt_http(address: str, path: str, *, with_tls: bool) -> StrangerAttempt:
    """GET without a key, and with TLS without a certificate. `address`: host:port."""
    host, port = split_address(address)
    request = f"GET {path} HTTP/1.1\r\nHost: {url_host(host)}\r\nConnection: close\r\n\r\n".encode()
    answer = await _sent(host, port, request, _tls() if with_tls else None)
    if answer == _CLOSED and with_tls:
        # What was sent can lose the alert on its way: a server that demands a certificate sends it by itself.
        answer = await _sent(host, port, b"", _tls())
    if isinstance(answer, StrangerAttempt):
        return answer
    words = answer.split(b"\r\n")[0].split(b" ")
    status = words[1].decode(errors="replace") if words[0].startswith(b"HTTP/1.") and len(words) > 1 else ""
    if status == "200":
        return StrangerAttempt("served", "200")
    if status in ("401", "403"):
        return StrangerAttempt("refused", status)
    return StrangerAttempt("unknown", f"the answer was {status}" if status else "the answer was no HTTP")


async def attempt_http2(address: str) -> StrangerAttempt:
    """Begin HTTP/2 over TLS without a certificate, as gRPC does. `address`: host:port."""
    host, port = split_address(address)
    context = _tls()
    context.set_alpn_protocols(["h2"])
    answer = await _sent(host, port, _HTTP2_PREFACE, context)
    if isinstance(answer, StrangerAttempt):
        # A server of HTTP/2 that serves begins with its settings.
        return StrangerAttempt("refused", answer.detail) if answer == _CLOSED else answer
    return StrangerAttempt("served", "it takes clients without a certificate")


async def attempt_redis(url: str) -> StrangerAttempt:
    """PING without the password of the URL. With TLS any certificate is taken."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        answer = await _answer(asyncio.open_unix_connection(parts.path), b"PING\r\n")
    else:
        tls = _tls() if parts.scheme == "rediss" else None
        answer = await _sent(parts.hostname or "localhost", parts.port or 6379, b"PING\r\n", tls)
    if isinstance(answer, StrangerAttempt):
        return answer
    said = answer.split(b"\r\n")[0].decode(errors="replace")
    if said == "+PONG":
        return StrangerAttempt("served", "PING was answered")
    refused = said.startswith(("-NOAUTH", "-NOPERM", "-DENIED"))
    return StrangerAttempt("refused" if refused else "unknown", said)


async def _sent(host: str, port: int, message: bytes, tls: ssl.SSLContext | None) -> bytes | StrangerAttempt:
    return await _answer(asyncio.open_connection(host, port, ssl=tls), message)


async def _answer(
    opening: Coroutine[None, None, tuple[asyncio.StreamReader, asyncio.StreamWriter]], message: bytes
) -> bytes | StrangerAttempt:
    """The first bytes with which a server answers a message, or why there are none."""
    is_open = False
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            reader, writer = await opening
            is_open = True
            try:
                writer.write(message)
                answer = await reader.read(4096)
            finally:
                writer.close()
    except ssl.SSLError as error:
        # An alert is a sentence of the server: it has ended the handshake. Other failures say nothing about it.
        if "ALERT" in (error.reason or ""):
            return StrangerAttempt("refused", "it demands a certificate")
        return StrangerAttempt("unknown", f"TLS failed: {error.reason or error}")
    except TimeoutError:
        return StrangerAttempt("unknown", f"no answer within {TIMEOUT_SECONDS:g} s")
    except (OSError, ValueError) as error:
        if is_open:
            return _CLOSED
        return StrangerAttempt("unknown", f"it cannot be reached: {getattr(error, 'strerror', None) or error}")
    return answer or _CLOSED


def _tls() -> ssl.SSLContext:
    """A stranger takes any certificate: only what the server demands is of interest."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
