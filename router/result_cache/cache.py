"""What is looked up for an arriving request, and what is kept of a complete answer.

An answer is reused for a request that has the same key (request_key.py). The key has everything that the answer depends
on, so a change of the model, an adapter or the safety policy leaves nothing to invalidate. An answer is kept only if
all of that was the same at its end as when its request arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from kvloom.config import ResultCacheConfig
from router.core.actions import AnswerCompleted
from router.core.events import CachedChoice, Request, ShardDescription
from router.result_cache.fingerprints import ModelFingerprint, fingerprints
from router.result_cache.memory import ResultMemory
from router.result_cache.request_key import request_key
from router.result_cache.stored_answer import StoredChoice, decode_answer, encode_answer


class Ticket(msgspec.Struct, frozen=True):
    """What an answer depends on besides its request, as of the arrival of that request."""

    fingerprint: ModelFingerprint
    policy_revision: str
    clearing: int
    """How often the cache had been cleared."""
    key: bytes


class SharedResults(Protocol):
    """Answers that routers share. Its methods never block and never raise."""

    def store(self, key: bytes, answer: bytes, tenant: str, seconds: float) -> None: ...


PiecesOf = Callable[[Request, StoredChoice], Sequence[str] | None]
KeyOf = Callable[[bytes, str, ModelFingerprint, str, Request], bytes]
NO_FINGERPRINTS: Final[Mapping[str, ModelFingerprint]] = {}


class ResultCache:
    """Pure but for what it is given: the same code serves, and runs under `kvloom dst`."""

    def __init__(
        self,
        config: ResultCacheConfig,
        secret: bytes,
        pieces_of: PiecesOf,
        policy_revision: Callable[[], str | None],
        scope_of: Callable[[Request], str] = lambda request: request.tenant,
        key_of: KeyOf = request_key,
    ) -> None:
        """`pieces_of` a choice: see pieces.py. `policy_revision` of the safety policy in force: "" if nothing is
        screened, None while it is not known. `scope_of` a request: those of different scopes share nothing."""
        self._config = config
        self._secret = secret
        self._pieces_of = pieces_of
        self._policy_revision = policy_revision
        self._scope_of = scope_of
        self._key_of = key_of
        self._fingerprints = NO_FINGERPRINTS
        self._num_clearings = 0
        self.memory = ResultMemory(config.max_bytes, config.max_entries)
        self.shared: SharedResults | None = None
        """None: this router shares nothing."""
        self.num_hits = 0
        self.num_misses = 0

    def fleet_changed(self, shards: Iterable[ShardDescription]) -> None:
        self._fingerprints = fingerprints(shards)

    def ticket(self, request: Request) -> Ticket | None:
        """None: the answer neither comes from the cache nor enters it."""
        fingerprint = self._fingerprints.get(request.model)
        revision = self._policy_revision()
        if not request.is_cacheable or fingerprint is None or revision is None:
            return None
        key = self._key_of(self._secret, self._scope_of(request), fingerprint, revision, request)
        return Ticket(fingerprint, revision, self._num_clearings, key)

    def find(self, ticket: Ticket, request: Request, now: float) -> Sequence[CachedChoice]:
        """The answer as the core sends it; empty if there is none. `now` in seconds, as everywhere here."""
        encoded = self.memory.get(ticket.key, now)
        cached = () if encoded is None else self._cached(encoded, request)
        if cached:
            self.num_hits += 1
        else:
            self.num_misses += 1
        return cached

    def keep(self, ticket: Ticket, completed: AnswerCompleted, now: float) -> None:
        """Keep a complete answer, if the same request would get it again."""
        request = completed.request
        num_tokens = sum(len(choice.token_ids) for choice in completed.choices)
        if (
            completed.is_result_cache_hit
            or not completed.is_reusable
            or num_tokens > self._config.max_answer_tokens
            or ticket.clearing != self._num_clearings
            or ticket.fingerprint != self._fingerprints.get(request.model)
            or ticket.policy_revision != self._policy_revision()
        ):
            return
        answer = encode_answer(completed.choices)
        self.memory.put(ticket.key, answer, request.tenant, now + self._config.ttl_seconds)
        if self.shared is not None:
            self.shared.store(ticket.key, answer, request.tenant, self._config.ttl_seconds)

    def clear(self, tenant: str | None) -> int:
        """Forget the answers of one tenant, or all (None), and those that are being generated. Returns how many this
        router had."""
        self._num_clearings += 1
        return self.memory.clear(tenant)

    def _cached(self, encoded: bytes, request: Request) -> Sequence[CachedChoice]:
        try:
            choices = decode_answer(encoded)
        except (msgspec.MsgspecError, ValueError):
            return ()
        if len(choices) != len(request.choices):
            return ()
        found: list[CachedChoice] = []
        for choice in choices:
            pieces = self._pieces_of(request, choice)
            if pieces is None:
                return ()
            found.append(CachedChoice(choice.token_ids, pieces, choice.finish))
        by_index = dict(zip(sorted(spec.index for spec in request.choices), found, strict=True))
        return [by_index[spec.index] for spec in request.choices]
