"""Attacks on what is inside the fabric: its processes' own ports, and its registry."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from lab.chaos.attackers import http2
from lab.chaos.attackers.targets import Attack, connection, read_all

_ANSWER_SECONDS: Final = 2.0
_COMMANDS: Final = (
    b"PING",
    b"AUTH guess",
    b"KEYS *",
    b"SET kvloom:shard:shard-0 garbage",
    b"DEL kvloom:shard:shard-0",
    b"CONFIG SET maxmemory 1",
    b"FLUSHALL",
    b"SHUTDOWN NOSAVE",
    b"*1000000\r\n$1000000000",
)


async def noise(attack: Attack) -> None:
    """Random bytes, HTTP and plain gRPC at every port that only processes of the fabric should use."""

    async def one(address: str, raw: bytes) -> None:
        try:
            async with connection(address) as (reader, writer):
                writer.write(raw)
                with contextlib.suppress(OSError):
                    await writer.drain()
                await read_all(reader, _ANSWER_SECONDS)
                attack.note("sent")
        except OSError as error:
            attack.note(type(error).__name__)

    plain_call = http2.PREFACE + http2.call_headers(1, "ListModels", host="x") + b"".join(http2.call_message(1, b""))
    for address in attack.targets.inner_addresses:
        raws = (
            attack.rng.randbytes(20_000),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + attack.rng.randbytes(500),
            b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
            plain_call,
        )
        await asyncio.gather(*(one(address, raw) for raw in raws))


async def registry_without_password(attack: Attack) -> None:
    """Commands at the registry by somebody who has no password."""
    if not attack.targets.redis_socket:
        return
    for command in _COMMANDS:
        try:
            reader, writer = await asyncio.open_unix_connection(attack.targets.redis_socket)
        except OSError as error:
            attack.note(type(error).__name__)
            continue
        try:
            writer.write(command + b"\r\n")
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer = await reader.readline()
            attack.note(answer.split(b" ")[0].decode(errors="replace").strip() or "closed")
        except OSError as error:
            attack.note(type(error).__name__)
        finally:
            writer.close()
