"""Planted bugs in the result cache."""

from __future__ import annotations

from typing import Any

from router.result_cache.cache import ResultCache
from tests.simulation.planted_bugs.registry import Patch, caught_by
from tools.dst.checkers import CachedAnswersOwn


@caught_by(CachedAnswersOwn, max_seeds=40)
def leaves_the_tenant_out_of_the_key(patch: Patch) -> None:
    """A tenant gets the answer that another one has got to the same request."""
    original = ResultCache.ticket

    def ticket(self: ResultCache, request: Any) -> Any:
        self._scope_of = lambda _request: ""
        return original(self, request)

    patch.setattr(ResultCache, "ticket", ticket)


@caught_by(CachedAnswersOwn, max_seeds=20, first_seed=225)
def leaves_the_policy_out_of_the_key(patch: Patch) -> None:
    """An answer that another policy has allowed is given although the policy in force was not asked."""
    original = ResultCache.ticket

    def ticket(self: ResultCache, request: Any) -> Any:
        key_of = self._key_of
        self._key_of = lambda secret, scope, fingerprint, _revision, request: key_of(
            secret, scope, fingerprint, "", request
        )
        found = original(self, request)
        self._key_of = key_of
        return found

    patch.setattr(ResultCache, "ticket", ticket)
