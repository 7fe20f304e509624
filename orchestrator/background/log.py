"""The events of background responses that run in this process."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

MAX_PIECE: Final = 256
"""Events of one piece."""

SaveSent = Callable[[int, bytes], Awaitable[bool]]
"""Stores how many events may have been sent, with their digest. Returns False if that is another one's business now."""


class DivergedError(Exception):
    """A response that was generated again is not what was sent of it."""


class ResponseLog:
    """The events of one response. Nothing is given to a reader before its digest is stored, so that whoever generates
    the response again can tell that it is the same."""

    def __init__(self, num_sent: int, sent_digest: bytes, save: SaveSent) -> None:
        """`num_sent`: how many events an earlier process may have sent."""
        self.events: list[bytes] = []
        self.is_over = False
        """There will be no further event."""
        self.is_lost = False
        """Another process has the events."""
        self._is_ending = False
        self._num_readable = 0
        self._num_fixed = num_sent
        """The first events that must never be others."""
        self._sent_digest = sent_digest
        self._save = save
        self._position = 0
        self._saving = asyncio.Lock()
        self._changed = asyncio.Event()
        self._digest = hashlib.sha256()
        """That of the first `_num_digested` events."""
        self._num_digested = 0
        self._num_sent_before = num_sent

    @property
    def readable(self) -> list[bytes]:
        """The events that may have been sent."""
        return self.events[: self._num_readable]

    def begin_again(self) -> None:
        """The response is generated from its beginning."""
        self._position = 0

    def add(self, event: bytes) -> None:
        """Raises DivergedError."""
        position = self._position
        if position < len(self.events) and self.events[position] != event:
            if position < max(self._num_readable, self._num_fixed):
                raise DivergedError(f"event {position} is another one")
            del self.events[position:]
        if position == len(self.events):
            self.events.append(event)
        self._position = position + 1
        if self._position == self._num_sent_before and self._num_digested < self._num_sent_before:
            digest, self._num_digested = _digest_of(self._digest, self.events), self._position
            if digest.digest() != self._sent_digest:
                raise DivergedError(f"the first {self._position} events are others")
            self._digest, self._num_readable = digest, self._position
        self._tell()

    def check_end(self) -> None:
        """To be called when the last event is known, which readers get once it is stored. Raises DivergedError."""
        if self._position < max(self._num_fixed, self._num_readable):
            raise DivergedError(f"there are {self._position} events only")
        del self.events[self._position :]
        self._is_ending = True

    def end(self, *more: bytes, is_lost: bool = False) -> None:
        """No further event comes: all are stored, with `more`, or another process has them (`is_lost`). With neither,
        nobody gets more than somebody has."""
        if more:
            self.events += more
            self._num_readable = len(self.events)
        self.is_over, self.is_lost = True, is_lost
        self._tell()

    async def read(self, num_known: int) -> AsyncIterator[list[bytes]]:
        """The events after the first `num_known`, in pieces, until the log is over. Raises KvloomError."""
        while True:
            changed = self._changed
            if num_known < self._num_readable:
                piece = self.events[num_known : min(self._num_readable, num_known + MAX_PIECE)]
                num_known += len(piece)
                yield piece
            elif self.is_over:
                return
            elif self._has_more(num_known):
                await self._make_readable()
            else:
                await changed.wait()

    def _has_more(self, num_known: int) -> bool:
        least = max(num_known, self._num_sent_before, self._num_readable)
        return len(self.events) > least and not self._is_ending

    async def _make_readable(self) -> None:
        async with self._saving:
            wanted = len(self.events)
            if not self._has_more(0):
                return
            digest = _digest_of(self._digest, self.events[self._num_digested : wanted])
            self._num_fixed = wanted
            if not await self._save(wanted, digest.digest()):
                message = "Another process continues this response."
                raise KvloomError(ErrorReason.ERROR_REASON_ORCHESTRATOR_UNAVAILABLE, message, retry_after_seconds=1.0)
            self._digest, self._num_digested = digest, wanted
            if not self.is_over:
                self._num_readable = wanted
                self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _digest_of(before: hashlib._Hash, events: Iterable[bytes]) -> hashlib._Hash:
    digest = before.copy()
    for event in events:
        digest.update(event + b"\n\n")
    return digest


ResponseLogs = dict[str, ResponseLog]
"""By the ids of their responses."""
