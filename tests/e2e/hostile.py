"""What hostile clients do to an edge, byte by byte. Every attack asserts what it is answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

CHAT_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
TIMEOUT_SECONDS = 20.0

Address = tuple[str, int]


@contextlib.asynccontextmanager
async def connection(address: Address) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address, limit=2**20)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_response(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """(status, JSON). Raises ConnectionError when the server closed without an answer."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError from error
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
    return int(head.split(b" ")[1]), json.loads(body)


async def exchange(address: Address, *pieces: bytes) -> tuple[int, Any]:
    """(0, None) when the server cut the connection while we were still sending."""
    async with connection(address) as (reader, writer):
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await read_response(reader)
        except ConnectionError:
            return 0, None


def chat(body: bytes) -> bytes:
    return CHAT_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chat_json(**fields: Any) -> bytes:
    message = {"role": "user", "content": "hi"}
    return chat(json.dumps({"model": "smollm2-135m-instruct", "messages": [message], **fields}).encode())


async def in_parallel(count: int, attack: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(attack())


# -- slow and silent -----------------------------------------------------------------------------------------------


async def slow_headers(address: Address) -> None:
    async def one() -> None:
        async with connection(address) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            answer = asyncio.create_task(read_response(reader))
            while not answer.done():
                writer.write(b"a")  # a byte now and then keeps an idle timer from running out
                await asyncio.wait([answer], timeout=0.1)
            status, body = answer.result()
            assert (status, body["error"]["code"]) == (408, "request_timeout")

    await in_parallel(60, one)


async def silent_connections(address: Address) -> None:
    async def one() -> None:
        async with connection(address) as (reader, _), asyncio.timeout(TIMEOUT_SECONDS):
            assert await reader.read() == b""

    await in_parallel(60, one)


async def slow_bodies(address: Address) -> None:
    async def one() -> None:
        status, body = await exchange(address, CHAT_HEAD + b'Content-Length: 1000\r\n\r\n{"model')
        assert (status, body["error"]["code"]) == (408, "request_timeout")

    await in_parallel(60, one)


async def too_many_connections(address: Address, limit: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(limit):
            await stack.enter_async_context(connection(address))
        status, body = await exchange(address, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (status, body and body["error"]["code"]) in ((503, "overloaded"), (0, None))


async def half_open_streams(address: Address) -> None:
    async def one() -> None:
        async with connection(address) as (reader, writer):
            writer.write(chat_json(stream=True, max_tokens=2000))
            await reader.readuntil(b"\r\n\r\n")

    await in_parallel(20, one)


# -- large and deep ------------------------------------------------------------------------------------------------


async def large_bodies(address: Address) -> None:
    status, _ = await exchange(address, chat(b'{"model": "m", "x": "' + b"a" * 10_000_000 + b'"}'))
    assert status in (413, 0)  # 0: cut off while it was sending on and on
    pieces = [b"%x\r\n" % 65_536 + b" " * 65_536 + b"\r\n"] * 160
    status, _ = await exchange(address, CHAT_HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *pieces)
    assert status in (413, 0)


async def many_large_bodies(address: Address) -> None:
    """More than one caller's bodies together may take: some are refused, and told so."""
    statuses: list[int] = []

    async def one() -> None:
        async with connection(address) as (reader, writer):
            writer.write(CHAT_HEAD + b"Content-Length: 2000000\r\n\r\n" + b" " * 1_500_000)
            with contextlib.suppress(ConnectionError):
                statuses.append((await read_response(reader))[0])

    await in_parallel(52, one)
    assert set(statuses) <= {429, 408}
    assert 429 in statuses


async def large_values(address: Address) -> None:
    many = 100_000
    cases: list[tuple[dict[str, Any], int, str | None]] = [
        ({"stop": ["a"] * many}, 400, "stop"),
        ({"stop_token_ids": [1] * many}, 400, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": "x"}] * 60_000}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 60_000}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x y " * 450_000}]}, 400, "messages"),
        ({"max_tokens": 10**400}, 400, None),
        ({"temperature": 10**400}, 400, None),
        ({"user" + "x" * many: 1, "max_tokens": 1}, 200, None),  # unknown, and left out
    ]
    for fields, expected, param in cases:
        status, body = await exchange(address, chat_json(**fields))
        assert status == expected, (list(fields), body)
        assert len(json.dumps(body)) < 2000
        if param is not None:
            assert body["error"]["param"] == param


async def deep_json(address: Address) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        for depth in (1000, 10_000, 300_000):
            deep = opening * depth + b"1" + closing * depth
            for field in (b"messages", b"tools", b"response_format", b"metadata"):
                body = b'{"model": "smollm2-135m-instruct", "%b": %b}' % (field, deep)
                status, answer = await exchange(address, chat(body))
                assert status == 400, answer
                assert answer["error"]["type"] == "invalid_request_error"


async def invalid_text(address: Address) -> None:
    for raw in (
        b"\xff\xfe",
        b'{"model": "\xc3\x28"}',
        b'{"model": "\xed\xa0\x80"}',
        b"\x00" * 100,
        b'{"model": "\\ud800"}',
    ):
        status, body = await exchange(address, chat(raw))
        assert status in (400, 404), (raw, body)
        assert body["error"]["type"] == "invalid_request_error"


# -- no HTTP -------------------------------------------------------------------------------------------------------


async def header_floods(address: Address) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    floods = [
        b"".join(b"X-%d: a\r\n" % i for i in range(10_000)),
        b"X: " + b"a" * 1_000_000 + b"\r\n",
        b"a" * 1_000_000,
        b"X: a\r\n" * 100_000,
        b"\r\n".join([b"Cookie: " + b"a" * 4000] * 200),
    ]
    for flood in floods:
        status, _ = await exchange(address, get + flood, b"\r\n\r\n")
        assert status in (400, 413, 0)
        async with connection(address) as (reader, writer):  # never ending
            with contextlib.suppress(ConnectionError):
                for begin in range(0, len(flood), 4096):
                    writer.write((get if not begin else b"") + flood[begin : begin + 4096])
                    await writer.drain()
                assert (await read_response(reader))[0] in (400, 408, 413)


async def pipelined_garbage(address: Address) -> None:
    async with connection(address) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 500 + b"\x00\x01garbage\r\n\r\n" * 100)
        statuses = [200]
        while statuses[-1] == 200:
            statuses.append((await read_response(reader))[0])
        assert statuses[-1] == 400
        assert await asyncio.wait_for(reader.read(), TIMEOUT_SECONDS) == b""


async def chunked_abuse(address: Address) -> None:
    head = CHAT_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    for chunks in (
        b"-1\r\n\r\n",
        b"FFFFFFFFFFFFFFFFF\r\n",
        b"5;" + b"x" * 1_000_000 + b"\r\nhello\r\n",
        b"5\r\nhelloworld\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"0\r\n" + b"Trailer: x\r\n" * 10_000 + b"\r\n",
    ):
        status, body = await exchange(address, head + chunks)
        assert status in (400, 408, 413, 0), (chunks[:30], body)
    status, body = await exchange(address, head + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n")
    assert status == 400, body
    both = CHAT_HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n"
    status, body = await exchange(address, both)
    assert status == 400, body


async def length_lies(address: Address) -> None:
    for lie in (b"abc", b"-1", b"+5", b"5, 6", b"0x10", b"9" * 40, b"5\r\nContent-Length: 6"):
        status, body = await exchange(address, CHAT_HEAD + b"Content-Length: " + lie + b"\r\n\r\nhello")
        assert status in (400, 413), (lie, body)
    # Shorter than what comes: the rest is no request, and is no part of this one.
    status, body = await exchange(address, CHAT_HEAD + b'Content-Length: 2\r\n\r\n{}"model": "x"}\r\n\r\n')
    assert status == 400, body
    # Longer, and then the sender goes.
    async with connection(address) as (_, writer):
        writer.write(CHAT_HEAD + b"Content-Length: 1000\r\n\r\n{")
        writer.write_eof()
