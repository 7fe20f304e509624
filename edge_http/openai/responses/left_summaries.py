"""Summaries of the turns that are left out of conversations that are too long, as long as this edge has them."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvloom.text.chat_message import ChatMessage
from kvloom_common.limits.scoped_cache import MAX_ENTRIES, ScopedCache

MAX_BYTES: Final = 16 * 2**20
KEPT_SECONDS: Final = 3600.0
"""How long a summary is kept, also if it is used."""
MAX_RUNNING: Final = 16
"""Summaries that are made at a time."""
HEAD: Final = "Summary of an earlier part of this conversation:\n"


class LeftTurns(NamedTuple):
    """Messages that were left out, and what names their summary."""

    scope: str
    version: str
    max_tokens: int
    """The most tokens that the summary may have."""
    messages: Sequence[ChatMessage]


class LeftSummaries:
    """A summary belongs to a scope (the caller's), to a version (who made it, and how long it may be), and to the
    messages that it stands for: another beginning of a conversation has another one."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`model` makes them."""
        self.model = model
        self._clock = clock
        self._known = ScopedCache[bytes, str](MAX_BYTES, MAX_ENTRIES, lambda text: len(text.encode()))
        self._running: dict[bytes, asyncio.Task[None]] = {}

    def find(self, left: LeftTurns) -> tuple[str, int]:
        """The summary of as many of the first messages as there is one of, and their number; "" and 0: of none."""
        for number, key in reversed([*enumerate(_keys(left), 1)]):
            text = self._known.get(key, self._clock())
            if text is not None:
                return text, number
        return "", 0

    def add(self, left: LeftTurns, text: str) -> None:
        *_, key = _keys(left)
        self._known.put(key, text, left.scope, self._clock() + KEPT_SECONDS)

    def begin(self, left: LeftTurns, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have `work` make the summary, unless it is being made, or too many are."""
        *_, key = _keys(left)
        if key not in self._running and len(self._running) < MAX_RUNNING:
            # What is logged of this work is not of the request that has begun it.
            task = asyncio.create_task(work(), name="summary of turns", context=contextvars.Context())
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))

    @property
    def num_running(self) -> int:
        """The number of summaries that are being made."""
        return len(self._running)

    async def close(self) -> None:
        """End what is running."""
        running = [*self._running.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _keys(left: LeftTurns) -> Iterator[bytes]:
    """The names of the first message, of the first two, and so on."""
    digest = hashlib.blake2b(msgspec.msgpack.encode((left.scope, left.version, left.max_tokens)), digest_size=16)
    for message in left.messages:
        digest.update(msgspec.msgpack.encode(message))
        yield digest.copy().digest()


def with_summary(kept: Sequence[ChatMessage], summary: str) -> list[ChatMessage]:
    """The messages with what is known of those before them. Most templates know one system message, at the
    beginning."""
    first = kept[0]
    if first.role == "system":
        return [first._replace(content=f"{first.content}\n\n{HEAD}{summary}"), *kept[1:]]
    return [ChatMessage("system", HEAD + summary), *kept]


def transcript(left: Sequence[ChatMessage], summary: str, max_chars: int) -> str:
    """The text that is to be summed up: the latest `max_chars` of it, behind the summary that there is already."""
    said = "\n\n".join(
        f"{message.role}: {message.content}"
        + "".join(f"\n[called {call.name}: {call.arguments}]" for call in message.tool_calls)
        for message in left
    )
    return (f"{HEAD}{summary}\n\n" if summary else "") + said[-max_chars:]
