"""A tokenization cache for each caller, in bounded memory.

A process that encodes a text sooner because it has seen it before tells its sender that somebody has sent it. So only
callers that share a cache scope (kvloom_common/access/kv_shares.py) share a cache. The caches together have a bound,
and the largest makes room for the others: a caller that floods the process with texts evicts its own.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from tokenizers import Tokenizer

from kvloom_common.text.public_pieces import PublicPieces
from kvloom_common.text.tokenization_cache import MAX_BLOCK_BYTES, CachedBytes, PieceCache, PieceRules

MAX_SCOPES: Final = 4096
"""The caches of so many callers are kept, those used most recently."""


class TokenizationCaches:
    """The caches of one tokenizer's callers. Not thread-safe, except for `learn`: use it on the event loop."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MAX_BLOCK_BYTES, max_scopes: int = MAX_SCOPES) -> None:
        self._tokenizer = tokenizer
        self._rules = PieceRules(tokenizer)
        self._max_bytes = max_bytes
        self._max_scopes = max_scopes
        self._public = PublicPieces()
        self._total = CachedBytes()
        self._by_scope: OrderedDict[str, PieceCache] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """The bytes that all callers' caches take."""
        return self._total.num_bytes

    @property
    def num_scopes(self) -> int:
        return len(self._by_scope)

    def of(self, scope: str | None) -> PieceCache:
        """The cache of the callers with this scope. None: one that is empty, and is not kept."""
        if scope is None:
            return PieceCache(self._rules, public=self._public)
        found = self._by_scope.get(scope)
        if found is not None:
            self._by_scope.move_to_end(scope)
            return found
        while len(self._by_scope) >= self._max_scopes:
            self._by_scope.popitem(last=False)[1].leave()
        found = self._by_scope[scope] = PieceCache(self._rules, self._max_bytes, public=self._public, total=self._total)
        return found

    def fit(self) -> None:
        """Keep the bound. Call this after texts were added."""
        while self._total.num_bytes > self._max_bytes:
            max(self._by_scope.values(), key=_num_bytes).shrink()

    def clear(self) -> None:
        """Forget what all callers have sent, to free the memory."""
        for cache in self._by_scope.values():
            cache.leave()
        self._by_scope.clear()

    def learn(self) -> None:
        """Learn the words that all callers have in common. Takes about 20 ms; may run in another thread."""
        if self._rules.cuts_words:
            self._public.learn(self._tokenizer)


def _num_bytes(cache: PieceCache) -> int:
    return cache.num_bytes
