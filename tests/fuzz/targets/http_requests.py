"""An edge's port, byte by byte: what is hardly HTTP, or means two things to two parsers.

Every request is answered by a well-formed response, or the connection is closed; never a 500, never silence. What is
left incomplete is ended by the edge's limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

from hypothesis import strategies as st

from kvloom_common.config import EdgeConfig
from tests.fakes.edge_world import chat_body, edge_world
from tests.fakes.fake_router_link import answer
from tests.fuzz.byte_edits import EDITS, PIECES, edited
from tests.fuzz.log_watch import LogWatch
from tests.fuzz.target import Check, Target, bytes_of, check_message, text_of

BODY: Final = json.dumps(chat_body(max_tokens=2))
METHODS = st.sampled_from(
    ["GET", "POST", "POST", "HEAD", "OPTIONS", "CONNECT", "TRACE", "PRI", "get", "G ET", "", "DELETE", "X" * 3000]
)
PATHS = st.sampled_from(
    [
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/tiny", "/health", "/metrics", "/", "*"),
        *("/v1/chat/completions/chatcmpl-1", "/v1/completions/x/cancel", "http://evil.example/health", "//health"),
        *("http://127.0.0.1:99999999/health", "http://[::1/health", "example:443", "/%00", "/%ff", "/\xff", "/health?"),
        *("/../../etc/passwd", "/health#x", "/health?" + "a=b&" * 2000, "", "http://", "http://@:/", "/\u00a0"),
    ]
)
VERSIONS = st.sampled_from(
    ["HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.10", "http/1.1", "HTTP/1.1 x", ""]
)
HEADERS: Final = (
    *("Host: x", "Host: x", "Content-Type: application/json", "Content-Length: 0", "Content-Length: 5"),
    *("Content-Length: -1", "Content-Length: +5", "Content-Length: 5, 6", "Content-Length: 0x10", "Content-Length: ٣"),
    *("Content-Length:", "Content-Length : 5", "Content-Length: " + "9" * 5000, "content-length: 5\x00"),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: xchunked"),
    *("Transfer-Encoding:\x0bchunked", "Transfer-Encoding : chunked", " Transfer-Encoding: chunked", "X: a\r\n b"),
    *("Expect: 100-continue", "Expect: 200-ok", "Connection: close", "Connection: upgrade", "Upgrade: websocket"),
    *("Upgrade: h2c", "Content-Encoding: gzip", "X-Request-Id: " + "a" * 300, "X-Request-Id: é", "Cookie: a=b; " * 60),
    *("Last-Event-Id: " + "9" * 400, "Last-Event-Id: -1", "x-kvloom-resume: on", "Idempotency-Key: \x00"),
    *("Authorization: Bearer ", "Authorization: \xff", "traceparent: 00-0-0-0", ": empty", "no colon", "\x00: a"),
    *("Content-Type: application/json; charset=\xff", "Content-Type: ;;;", "Content-Type: application/json; a*=b''%"),
    *("X-Forwarded-For: " + "1.2.3.4, " * 100, "Range: bytes=0-", "Host: a\r\nHost: b", "Host:", "X: " + "a" * 20_000),
)
BODIES = st.sampled_from(
    [
        *("", "{}", "hello", BODY, "\x00", "[" * 3000, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"),
        *("5\r\nhello\r\n0\r\n\r\n", f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n", "0\r\n\r\n", "0\r\nX: y\r\n\r\n"),
        *(
            "5;ext=1\r\nhello\r\n0\r\n\r\n",
            "5\nhello\n0\n\n",
            "-1\r\n",
            "FFFFFFFFFFFFFFFFF\r\n",
            "5 \r\nhello\r\n0\r\n\r\n",
        ),
        *("0x5\r\nhello\r\n0\r\n\r\n", "5\r\nhelloX\r\n0\r\n\r\n", "1;" + "x" * 20_000, "\r\n\r\n"),
    ]
)
NEWLINES = st.sampled_from(["\r\n", "\r\n", "\r\n", "\r\n", "\n", "\r", "\r\r\n"])


def _request(method: str, path: str, version: str, headers: list[str], body: str, newline: str, fits: bool) -> str:
    if fits:
        headers = [*headers, f"Content-Length: {len(body)}"]
    lines = [f"{method} {path} {version}", *headers, "", ""]
    return text_of(newline.join(lines).encode("latin-1", "replace")) + body


REQUESTS = st.builds(
    _request, METHODS, PATHS, VERSIONS, st.lists(st.sampled_from(HEADERS), max_size=6), BODIES, NEWLINES, st.booleans()
)
GOOD = st.builds(
    _request,
    st.just("POST"),
    st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    st.just("HTTP/1.1"),
    st.just(["Host: x", "Content-Type: application/json"]),
    st.just(BODY),
    st.just("\r\n"),
    st.just(True),
)
INPUTS = st.fixed_dictionaries({"requests": st.lists(REQUESTS | GOOD | PIECES, max_size=4), "edits": EDITS})

STATUSES: Final = frozenset((200, 400, 401, 404, 405, 408, 409, 413, 415, 417, 429, 431, 501, 505))
"""What may be answered; 501 is for transfer codings, and there is no overload in this test (503)."""
REPLY_SECONDS: Final = 10.0
LIMIT_SECONDS: Final = 0.3
LAST: Final = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Response(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes


@contextlib.asynccontextmanager
async def open_edge(_watch: LogWatch) -> AsyncIterator[Check]:
    config = EdgeConfig(header_timeout_seconds=LIMIT_SECONDS, body_timeout_seconds=LIMIT_SECONDS)
    async with edge_world(config) as world:
        world.link.script = answer("hi")

        async def check(value: Any) -> None:
            raw = edited(b"".join(map(bytes_of, value["requests"])), value["edits"])
            for response in responses_of(await exchange(world.address, raw)):
                check_response(response)
            status, _ = await world.chat(max_tokens=2)
            assert status == 200

        yield check


async def exchange(address: tuple[str, int], raw: bytes) -> bytes:
    """Write, with a last good request that asks the edge to close, and read until it does so."""
    reader, writer = await asyncio.open_connection(*address)
    received = b""
    try:
        async with asyncio.timeout(REPLY_SECONDS):
            with contextlib.suppress(ConnectionError):
                writer.write(raw + LAST)
                await writer.drain()
                while chunk := await reader.read(65_536):
                    received += chunk
        return received
    finally:
        writer.transport.abort()


def responses_of(received: bytes) -> list[Response]:
    """Raises AssertionError unless the bytes are whole responses, the last of which may be cut short."""
    found: list[Response] = []
    while received:
        head, separator, rest = received.partition(b"\r\n\r\n")
        assert separator, f"no end of the head: {received[:200]!r}"
        status_line, *lines = head.split(b"\r\n")
        version, code, _reason = status_line.split(b" ", 2)
        assert version in (b"HTTP/1.1", b"HTTP/1.0"), status_line
        headers = {name.lower(): value for name, value in (line.split(b": ", 1) for line in lines if line)}
        if code == b"100":
            received = rest
            continue
        body, received = _body(headers, rest)
        found.append(Response(int(code), headers, body))
    return found


def _body(headers: dict[bytes, bytes], rest: bytes) -> tuple[bytes, bytes]:
    """(the body, what follows it). The body of a response to HEAD is missing, so that the next head follows at once."""
    if headers.get(b"transfer-encoding") == b"chunked":
        body, _, rest = rest.partition(b"0\r\n\r\n")
        return body, rest
    size = int(headers.get(b"content-length", b"0"))
    return (b"", rest) if rest.startswith(b"HTTP/1.") else (rest[:size], rest[size:])


def check_response(response: Response) -> None:
    assert response.status in STATUSES, response
    assert b"server" not in response.headers
    if response.status >= 400 and response.body:
        error = json.loads(response.body)["error"]
        assert isinstance(error["type"], str)
        check_message(error["message"])


TARGET = Target("http_requests", INPUTS, open_edge, suite_examples=40)
