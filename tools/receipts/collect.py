"""Asks a fabric for short answers with receipts, of which a sample is then computed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from kvloom.client.client import Client
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

MAX_OPEN: Final = 32
"""Requests at a time: enough for full batches."""


async def collected(client: Client, model: str, count: int, max_tokens: int, seed: int) -> AsyncGenerator[bytes]:
    """The receipts as JSON, in the order in which the answers end. Raises KvloomError."""
    room = asyncio.Semaphore(MAX_OPEN)

    async def ask(number: int) -> bytes:
        async with room:
            text = f"Question {seed}.{number}: what is {number} times {seed + 7}? Answer:"
            answer = await client.complete(
                model=model, text=text, max_tokens=max_tokens, seed=seed + number, no_result_cache=True, receipt=True
            )
        if not answer.receipt:
            raise KvloomError(
                ErrorReason.ERROR_REASON_UNSUPPORTED_PARAMETER,
                "The router gives no receipts: set router.receipts.enabled.",
            )
        return answer.receipt

    tasks = [asyncio.ensure_future(ask(number)) for number in range(count)]
    try:
        for ended in asyncio.as_completed(tasks):
            yield await ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
