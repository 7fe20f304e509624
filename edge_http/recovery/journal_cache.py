"""Journals of edges that have died, read once for all clients that come back at about the same time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from edge_http.recovery.journal import ResumeJournal
from edge_http.resume.records import ProgressDelta

KEPT_SECONDS: Final = 5.0
MAX_JOURNALS: Final = 4


class _Copy:
    def __init__(self) -> None:
        self.last_row = ""
        self.news: dict[int, list[ProgressDelta]] = {}
        """By the response's number."""
        self.reading = asyncio.Lock()


class JournalCache:
    def __init__(self, journal: ResumeJournal) -> None:
        self._journal = journal
        self._copies: OrderedDict[str, _Copy] = OrderedDict()

    async def news_of(self, tag: str, number: int) -> Sequence[ProgressDelta]:
        """All that the journal of that edge has of a response now. Raises RedisError."""
        copy = self._copies.get(tag)
        if copy is None:
            copy = self._copies[tag] = _Copy()
            asyncio.get_running_loop().call_later(KEPT_SECONDS, self._forget, tag, copy)
            if len(self._copies) > MAX_JOURNALS:
                self._copies.popitem(last=False)
        async with copy.reading:
            found, copy.last_row = await self._journal.read(tag, copy.last_row)
            for news in found:
                copy.news.setdefault(news.number, []).append(news)
        return copy.news.get(number, ())

    def _forget(self, tag: str, copy: _Copy) -> None:
        if self._copies.get(tag) is copy:
            del self._copies[tag]
