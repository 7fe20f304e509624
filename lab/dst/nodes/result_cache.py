"""A router's result cache: the real one, with keys and texts of simulated requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from kvloom_common.config import ResultCacheConfig
from lab.dst import script
from router.core.events import Request
from router.features.fingerprints import ModelFingerprint
from router.features.result_cache.cache import ResultCache
from router.features.result_cache.stored_answer import StoredChoice
from router.features.result_recorder import ResultRecorder

TTL_SECONDS = 2.0


def new_keeper(policy_revision: Callable[[], str | None], now: Callable[[], float]) -> ResultRecorder:
    """With a cache so small that answers are evicted, and expire."""
    config = ResultCacheConfig(enabled=True, ttl_seconds=TTL_SECONDS)
    cache = ResultCache(config, b"", _pieces, key_of=_key, max_entries=6)
    return ResultRecorder(cache, None, policy_revision, now)


def _key(_secret: bytes, scope: str, fingerprint: ModelFingerprint, policy_revision: str, request: Request) -> bytes:
    indexes = [spec.index for spec in request.choices]
    parts = (scope, fingerprint, policy_revision, *content_of(request), indexes)
    return hashlib.sha256(repr(parts).encode()).digest()


def content_of(request: Request) -> tuple[object, ...]:
    """Returns what a request asks for."""
    assert isinstance(request.sampling, script.ScriptedSampling)
    prompt = tuple(request.prompt_token_ids), request.prompt_text
    return request.model, request.adapter, *prompt, request.sampling.script_key, request.max_tokens


def _pieces(_request: Request, choice: StoredChoice) -> Sequence[str] | None:
    """Returns the pieces of text that a shard sends: see script.text_shown."""
    tokens = choice.token_ids
    texts = [script.text_shown(tokens, count + 1, is_final=count + 1 == len(tokens)) for count in range(len(tokens))]
    if not texts or len(texts[-1]) != choice.num_chars:
        return None
    return [text[len(before) :] for before, text in zip(["", *texts], texts, strict=False)]
