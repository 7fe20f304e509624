"""Between the driver and the core, for requests whose whole answers matter: those of the result cache, and those that
ask for a receipt. Without either there is none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable

import msgspec

from kvloom.v1.generation_pb2 import RESULT_CACHE_USE_HIT, RESULT_CACHE_USE_MISS
from router.core.actions import AnswerCompleted
from router.core.events import Request, RequestArrived, ShardDescription
from router.features.fingerprints import NO_FINGERPRINTS, ModelFingerprint, fingerprints
from router.features.receipts.writer import ReceiptWriter
from router.features.result_cache.cache import ResultCache, SharedResults


class ResultTicket(msgspec.Struct, frozen=True):
    """Holds what an answer depends on besides its request, as of the arrival of that request
    (RequestArrived.ticket)."""

    fingerprint: ModelFingerprint | None
    policy_revision: str | None
    key: bytes
    """In the result cache; b"": it is not for the cache."""
    clearing: int
    """How often the cache had been cleared."""


def _pass_on_nothing(_event: RequestArrived) -> None:
    pass


class ResultRecorder:
    """Implements `router.core_driver.AnswerSink`. Pure but for what it is given, as `kvloom-lab dst` runs it too."""

    def __init__(
        self,
        cache: ResultCache | None,
        receipts: ReceiptWriter | None,
        policy_revision: Callable[[], str | None],
        now: Callable[[], float],
    ) -> None:
        """`policy_revision` of the safety policy in force: "" if nothing is screened, None while it is not known. `now`
        in seconds since 1970."""
        self._cache = cache
        self._receipts = receipts
        self._policy_revision = policy_revision
        self._now = now
        self._fingerprints = NO_FINGERPRINTS
        self._shared: SharedResults | None = None
        self._pass_on: Callable[[RequestArrived], None] = _pass_on_nothing
        self._held: dict[int, tuple[Request, ResultTicket]] = {}
        """Requests for which the shared answers are asked, in their order."""
        self._num_held = 0

    def share(self, shared: SharedResults, pass_on: Callable[[RequestArrived], None]) -> None:
        """Also use what other routers have answered. `pass_on` takes requests for which `arrived` returned None."""
        self._shared, self._pass_on = shared, pass_on
        if self._cache is not None:
            self._cache.shared = shared

    def fleet_changed(self, shards: Iterable[ShardDescription]) -> None:
        self._fingerprints = fingerprints(shards)

    def clear(self, scopes: Collection[str] | None) -> int:
        """Forget cached answers of some scopes, or all (None). Returns how many there were."""
        return 0 if self._cache is None else self._cache.clear(scopes)

    def arrived(self, request: Request) -> RequestArrived | None:
        if not (request.is_cacheable or request.wants_receipt):
            return RequestArrived(request)
        fingerprint, revision = self._fingerprints.get(request.model), self._policy_revision()
        cache = self._cache
        if cache is None or not request.is_cacheable or fingerprint is None or revision is None:
            if not request.wants_receipt:
                return RequestArrived(request)
            return RequestArrived(request, ResultTicket(fingerprint, revision, b"", 0))
        key = cache.key(request, fingerprint, revision)
        ticket = ResultTicket(fingerprint, revision, key, cache.num_clearings)
        if self._shared is not None and self._shared.is_asked and not cache.has(key, self._now()):
            self._hold(cache, self._shared, request, ticket)
            return None
        return self._looked_up(cache, request, ticket)

    def release(self) -> None:
        """Pass on the requests that are held, as they are: one of them may be cancelled, or its client gone."""
        for number in list(self._held):
            self._on_found(number, None)

    def _hold(self, cache: ResultCache, shared: SharedResults, request: Request, ticket: ResultTicket) -> None:
        self._num_held = number = self._num_held + 1
        self._held[number] = request, ticket
        shared.look_up(ticket.key, cache.scope_of(request), functools.partial(self._on_found, number))

    def _on_found(self, number: int, answer: bytes | None) -> None:
        held = self._held.pop(number, None)
        if held is None or self._cache is None:
            return
        request, ticket = held
        if answer is not None and ticket.clearing == self._cache.num_clearings:
            self._cache.take(ticket.key, answer, self._cache.scope_of(request), self._now())
        self._pass_on(self._looked_up(self._cache, request, ticket))

    def _looked_up(self, cache: ResultCache, request: Request, ticket: ResultTicket) -> RequestArrived:
        cached = cache.find(ticket.key, request, self._now())
        use = RESULT_CACHE_USE_HIT if cached else RESULT_CACHE_USE_MISS
        return RequestArrived(request, ticket, use, cached)

    def completed(self, completed: AnswerCompleted) -> None:
        ticket, request, now = completed.ticket, completed.request, self._now()
        assert isinstance(ticket, ResultTicket)
        same_model = ticket.fingerprint is not None and ticket.fingerprint == self._fingerprints.get(request.model)
        if self._cache is not None and ticket.key:
            is_unchanged = same_model and ticket.policy_revision == self._policy_revision()
            if is_unchanged and ticket.clearing == self._cache.num_clearings:
                self._cache.keep(ticket.key, completed, now)
        if self._receipts is not None and request.wants_receipt:
            fingerprint = ticket.fingerprint if same_model else None
            last = completed.choices[-1].finish  # they are in the order of their ends
            last.receipt = self._receipts.write(completed, fingerprint, ticket.policy_revision or "", now)
