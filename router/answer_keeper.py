"""Between the driver and the core, for requests whose whole answers matter: those of the result cache, and those that
ask for a receipt. Without either there is none."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvloom.v1.generation_pb2 import RESULT_CACHE_USE_HIT, RESULT_CACHE_USE_MISS
from router.core.actions import AnswerCompleted
from router.core.events import Request, RequestArrived
from router.result_cache.cache import ResultCache, Ticket


class _Kept(msgspec.Struct, frozen=True):
    """The ticket of a request (RequestArrived.ticket)."""

    of_cache: Ticket | None


class AnswerKeeper:
    """Implements `router.core_driver.Keeper`."""

    def __init__(self, cache: ResultCache | None, now: Callable[[], float]) -> None:
        """`now` in seconds since 1970."""
        self._cache = cache
        self._now = now

    def arrived(self, request: Request) -> RequestArrived:
        cache = self._cache
        ticket = None if cache is None else cache.ticket(request)
        if cache is None or ticket is None:
            return RequestArrived(request)
        cached = cache.find(ticket, request, self._now())
        use = RESULT_CACHE_USE_HIT if cached else RESULT_CACHE_USE_MISS
        return RequestArrived(request, _Kept(ticket), use, cached)

    def completed(self, completed: AnswerCompleted) -> None:
        assert isinstance(completed.ticket, _Kept)
        if self._cache is not None and completed.ticket.of_cache is not None:
            self._cache.keep(completed.ticket.of_cache, completed, self._now())
