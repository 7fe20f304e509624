"""Attacks over HTTP with requests that are valid, but want far more than their share."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from lab.chaos.attackers.malformed import chat_request
from lab.chaos.attackers.targets import Attack, Stream, connection, read_all, status_of

NUM_UNREAD: Final = 300
_UNREAD_SECONDS: Final = 15.0
_NUM_LONG: Final = 16
_LONG_SECONDS: Final = 10.0


async def unread_streams(attack: Attack) -> None:
    """Hundreds of streamed answers that are not read."""
    request = chat_request(attack.targets, stream=True, max_tokens=2000)
    async with contextlib.AsyncExitStack() as stack:
        streams: list[Stream] = []
        for _ in range(NUM_UNREAD):
            try:
                reader, writer = await stack.enter_async_context(connection(attack.targets.http_address))
            except OSError as error:
                attack.note(type(error).__name__)
                continue
            writer.transport.pause_reading()  # pyrefly: ignore[missing-attribute]
            writer.write(request)
            streams.append((reader, writer))
        attack.note("opened", len(streams))
        await asyncio.sleep(_UNREAD_SECONDS)


async def many_choices(attack: Attack) -> None:
    """Long answers with 16 choices each, read as fast as they come."""
    await _answers(attack, stream=True, n=16, max_tokens=2000)


async def large_answers(attack: Attack) -> None:
    """The largest answers that a request can ask for, not streamed."""
    await _answers(attack, n=16, max_tokens=2000, logprobs=True, top_logprobs=20)


async def _answers(attack: Attack, **fields: object) -> None:
    request = chat_request(attack.targets, **fields)

    async def one() -> None:
        try:
            async with connection(attack.targets.http_address) as (reader, writer):
                writer.write(request)
                attack.note(await status_of(reader))
                await read_all(reader, _LONG_SECONDS)
        except OSError as error:
            attack.note(type(error).__name__)

    await asyncio.gather(*(one() for _ in range(_NUM_LONG)))
