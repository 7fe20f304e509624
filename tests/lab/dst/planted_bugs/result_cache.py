"""Planted bugs in the result cache."""

from __future__ import annotations

from typing import Any

import msgspec

from lab.dst.checkers import CachedAnswersOwn
from router.features.result_cache.cache import ResultCache
from tests.lab.dst.planted_bugs.registry import Patch, caught_by


@caught_by(CachedAnswersOwn, max_seeds=40)
def leaves_the_tenant_out_of_the_key(patch: Patch) -> None:
    """A tenant gets the answer that another one has got to the same request."""
    original = ResultCache.key

    def key(self: ResultCache, request: Any, fingerprint: Any, revision: str) -> bytes:
        return original(self, msgspec.structs.replace(request, tenant=""), fingerprint, revision)

    patch.setattr(ResultCache, "key", key)


@caught_by(CachedAnswersOwn, max_seeds=20, first_seed=300, is_rare=True)
def leaves_the_policy_out_of_the_key(patch: Patch) -> None:
    """An answer that another policy has allowed is given although the policy in force was not asked."""
    original = ResultCache.key

    def key(self: ResultCache, request: Any, fingerprint: Any, _revision: str) -> bytes:
        return original(self, request, fingerprint, "")

    patch.setattr(ResultCache, "key", key)
