"""Looks up answers for arriving requests, and keeps complete ones.

An answer is reused for a request that has the same key (request_key.py). The key has everything that the answer depends
on, so a change of the model, an adapter or the safety policy leaves nothing to invalidate. An answer is kept only if
all of that was the same at its end as when its request arrived (router/features/result_recorder.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, Protocol

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from kvloom_common.config import ResultCacheConfig
from kvloom_common.limits.scoped_cache import MAX_ENTRIES, ScopedCache
from kvloom_common.metrics.table import CollectorOf
from router import metric_table as table
from router.core.actions import AnswerCompleted
from router.core.events import CachedChoice, Request
from router.features.fingerprints import ModelFingerprint
from router.features.result_cache.request_key import request_key
from router.features.result_cache.stored_answer import StoredChoice, decode_answer, encode_answer

ENTRY_BYTES: Final = 400
"""About what an entry takes besides its answer: its key, its place in the dictionary, and the objects' heads."""


class ResultMemory(ScopedCache[bytes, bytes]):
    """Answers by key. A scope says who may get them: see ResultCache.scope_of."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        super().__init__(max_bytes, max_entries, _size)


def _size(answer: bytes) -> int:
    return len(answer) + ENTRY_BYTES


MAX_ANSWER_TOKENS: Final = 1024
"""Longer answers (of all choices together) are not kept. A cached answer is sent at once, and a longer one could exceed
what an edge buffers for a slow reader."""


class SharedResults(Protocol):
    """Answers that routers share. Its methods never block and never raise."""

    @property
    def is_asked(self) -> bool:
        """True when a look-up makes sense now."""
        ...

    def look_up(self, key: bytes, scope: str, on_found: Callable[[bytes | None], None]) -> None:
        """Calls `on_found` within a short time, with the answer or None."""
        ...

    def store(self, key: bytes, answer: bytes, scope: str, seconds: float) -> None: ...


PiecesOf = Callable[[Request, StoredChoice], Sequence[str] | None]
KeyOf = Callable[[bytes, str, ModelFingerprint, str, Request], bytes]


class ResultCache:
    """Pure but for what it is given: the same code serves, and runs under `kvloom-lab dst`."""

    def __init__(
        self,
        config: ResultCacheConfig,
        secret: bytes,
        pieces_of: PiecesOf,
        scope_of: Callable[[Request], str] = lambda request: request.tenant,
        key_of: KeyOf = request_key,
        max_entries: int = MAX_ENTRIES,
        max_answer_tokens: int = MAX_ANSWER_TOKENS,
    ) -> None:
        """`pieces_of` a choice: see pieces.py. `scope_of` a request: those of different scopes share nothing."""
        self._config = config
        self._secret = secret
        self._pieces_of = pieces_of
        self.scope_of = scope_of
        self._max_answer_tokens = max_answer_tokens
        self._key_of = key_of
        self.num_clearings = 0
        self.memory = ResultMemory(config.max_bytes, max_entries)
        self.shared: SharedResults | None = None
        """None: this router shares nothing."""
        self.num_hits = 0
        self.num_misses = 0

    def key(self, request: Request, fingerprint: ModelFingerprint, policy_revision: str) -> bytes:
        return self._key_of(self._secret, self.scope_of(request), fingerprint, policy_revision, request)

    def find(self, key: bytes, request: Request, now: float) -> Sequence[CachedChoice]:
        """The answer as the core sends it; empty if there is none. `now` in seconds, as everywhere here."""
        encoded = self.memory.get(key, now)
        cached = () if encoded is None else self._cached(encoded, request)
        if cached:
            self.num_hits += 1
        else:
            self.num_misses += 1
        return cached

    def has(self, key: bytes, now: float) -> bool:
        """True when this router itself has an answer."""
        return self.memory.get(key, now) is not None

    def take(self, key: bytes, answer: bytes, scope: str, now: float) -> None:
        """Keep what another router has shared; it may become twice as old as the others."""
        self.memory.put(key, answer, scope, now + self._config.ttl_seconds)

    def keep(self, key: bytes, completed: AnswerCompleted, now: float) -> None:
        """Keep a complete answer, if the same request may get it again."""
        num_tokens = sum(len(choice.token_ids) for choice in completed.choices)
        if completed.is_result_cache_hit or not (completed.is_exact and completed.is_screened):
            return
        if num_tokens > self._max_answer_tokens:
            return
        answer, scope = encode_answer(completed.choices), self.scope_of(completed.request)
        self.memory.put(key, answer, scope, now + self._config.ttl_seconds)
        if self.shared is not None:
            self.shared.store(key, answer, scope, self._config.ttl_seconds)

    def clear(self, scopes: Collection[str] | None) -> int:
        """Forget the answers of some scopes, or all (None), and those that are being generated. Returns how many this
        router had."""
        self.num_clearings += 1
        return self.memory.clear(scopes)

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


def observe(cache: ResultCache, registry: CollectorRegistry) -> None:
    """Shows the counts of a cache in a registry."""

    def collect() -> Iterator[Metric]:
        yield table.RESULT_CACHE_REQUESTS.collected({("hit",): cache.num_hits, ("miss",): cache.num_misses})
        yield table.RESULT_CACHE_ANSWERS.collected(len(cache.memory))
        yield table.RESULT_CACHE_BYTES.collected(cache.memory.num_bytes)
        yield table.RESULT_CACHE_EVICTIONS.collected(cache.memory.num_evicted)

    CollectorOf(registry, collect)
