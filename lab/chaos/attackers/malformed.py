"""Attacks over HTTP with requests that are slow, malformed, too large, or too many."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, Final

from lab.chaos.attackers.targets import FLOOD_HOST, Attack, Targets, connection, exchange, status_of

_NUM_SLOW: Final = 40
_SLOW_SECONDS: Final = 12.0
_NUM_FLOOD: Final = 500
_FLOOD_SECONDS: Final = 2.0
_LARGE_BYTES: Final = 12_000_000
_POST: Final = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def chat_request(targets: Targets, **fields: Any) -> bytes:
    body = json.dumps({"model": targets.model, "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    return _head_of(targets) + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _head_of(targets: Targets) -> bytes:
    """Returns the head of a request that is read, whatever else is wrong with it."""
    return _POST + b"Authorization: Bearer %b\r\n" % targets.key.encode() if targets.key else _POST


async def slow_headers(attack: Attack) -> None:
    """Headers that come byte by byte."""

    async def one() -> None:
        try:
            async with connection(attack.targets.http_address) as (reader, writer):
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
                answer = asyncio.create_task(status_of(reader))
                for _ in range(int(_SLOW_SECONDS / 0.5)):
                    await asyncio.wait([answer], timeout=0.5)
                    if answer.done():
                        break
                    writer.write(b"a")
                attack.note(answer.result() if answer.done() else "still open")
                answer.cancel()
                await asyncio.gather(answer, return_exceptions=True)
        except OSError as error:
            attack.note(type(error).__name__)

    await asyncio.gather(*(one() for _ in range(_NUM_SLOW)))


async def smuggling(attack: Attack) -> None:
    """Requests whose length can be read in two ways, and what a careless server takes for a second request."""
    inner = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    shapes = [
        _POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner,
        _POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + inner,
        _POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + inner,
        _POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + inner,
        _POST + b"Transfer-Encoding:\x0bchunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + inner,
        _POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        _POST + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
        _POST + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
        _POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"Trailer: x\r\n" * 5000 + b"\r\n",
        _POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello" + inner,
        _POST + b"Content-Length: +5\r\n\r\nhello" + inner,
        _POST + b"Content-Length: -5\r\n\r\nhello" + inner,
        _POST + b"Content-Length: 2\n\r\n{}" + inner,
        b"GET /health HTTP/1.1\r\nHost: x\r\n continued: 1\r\n\r\n" + inner,
        b"GET /health HTTP/1.1\nHost: x\n\n" + inner,
        b"GET http://other/health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\x00b\r\n\r\n" + inner,
        b"GET /health HTTP/9.9\r\n\r\n\x00\x01garbage",
    ]
    attack.rng.shuffle(shapes)
    for shape in shapes:
        await exchange(attack, shape)


async def large_bodies(attack: Attack) -> None:
    """Bodies over the limit: announced, in chunks, and announced but never sent."""
    chunk = b"%x\r\n" % 65_536 + b" " * 65_536 + b"\r\n"
    raws = (
        _POST + b"Content-Length: %d\r\n\r\n" % _LARGE_BYTES + b" " * _LARGE_BYTES,
        _POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * (_LARGE_BYTES // 65_536),
        *[_POST + b"Content-Length: 4000000\r\n\r\n" + b" " * 3_000_000] * 4,
    )
    await asyncio.gather(*(exchange(attack, raw) for raw in raws))


async def guide_bombs(attack: Attack) -> None:
    """Guides whose automata would be enormous, and JSON that is nested deeply."""
    targets = attack.targets
    nested: Any = {"type": "string"}
    for _ in range(60):  # pyrefly: ignore[non-convergent-recursion]
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    wide = {"type": "object", "properties": {f"p{i}": {"enum": list(range(200))} for i in range(200)}}
    itself = {"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}] * 8}}, "$ref": "#/$defs/n"}
    regexes = ("(a{1,1000}){1,1000}", "((a|b|ab)*c){500}", "(.*)*x" * 200, "[" * 5000)
    grammars = ("start: start start | start", "start: " + "(" * 2000 + '"a"' + ")" * 2000)
    guides: list[dict[str, Any]] = [
        *({"response_format": _schema(schema)} for schema in (nested, wide, itself)),
        *({"structured_outputs": {"regex": regex}} for regex in regexes),
        *({"structured_outputs": {"grammar": grammar}} for grammar in grammars),
    ]
    raws = [chat_request(targets, max_tokens=2, **guide) for guide in guides]
    deep = b"[" * 50_000 + b"]" * 50_000
    body = b'{"model": "%b", "messages": %b}' % (targets.model.encode(), deep)
    raws.append(_head_of(targets) + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    for raw in raws:
        await exchange(attack, raw)


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}


async def connection_flood(attack: Attack) -> None:
    """Very many connections from one address."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(_NUM_FLOOD):
            try:
                await stack.enter_async_context(connection(attack.targets.http_address, FLOOD_HOST))
            except OSError as error:
                attack.note(type(error).__name__)
            else:
                attack.note("opened")
        await asyncio.sleep(_FLOOD_SECONDS)
