"""Placement policies of other packages: found and loaded outside the router core, which stays pure."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvloom_common.plugins import PluginError, PluginGroup
from kvloom_common.process.access_log import FailureLog
from router.core.placement import POLICIES
from router.core.placement.policy import Arrival, Candidate, Policy

PLACEMENT_POLICIES: Final = PluginGroup("kvloom.placement_policies", "placement policy", POLICIES)


def plugin_policy(name: str) -> Callable[[], Policy] | None:
    """Returns the maker of a plugin's policy, which raises PluginError if it makes none. None if `name` is a policy of
    kvloom's own. Raises PluginError."""
    if name in POLICIES:
        return None
    return functools.partial(_made, name, PLACEMENT_POLICIES.load(name))


def guarded_policy(name: str) -> Callable[[], Policy] | None:
    """The same, for a router: its policy cannot fail."""
    new_policy = plugin_policy(name)
    return None if new_policy is None else lambda: GuardedPolicy(name, new_policy())


def _made(name: str, factory: Any) -> Policy:
    try:
        policy = factory()
    except Exception as error:
        raise PluginError(f"The placement policy {name!r} cannot be made: {error!r}") from error
    if not isinstance(policy, Policy):
        raise PluginError(f"The placement policy {name!r} is no router.core.placement.Policy: {type(policy).__name__}")
    terms: Any = getattr(policy, "terms", ())
    if not isinstance(terms, tuple) or not terms or not all(isinstance(term, str) and term for term in terms):
        raise PluginError(f"The placement policy {name!r} does not name its `terms`: {terms!r}")
    return policy


class GuardedPolicy(Policy):
    """The policy of a plugin, in a router. Where it raises an error or returns no costs, that placement is made by the
    predicted time to the first token, and the log names the error."""

    def __init__(self, name: str, policy: Policy, now: Callable[[], float] = time.monotonic) -> None:
        self.terms = policy.terms
        self.hold = policy.hold
        self._policy = policy
        self._failures = FailureLog("placement_policy_failed", now, policy=name)

    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        try:
            return _checked(self._policy.costs(arrival, candidates), len(candidates), len(self.terms))
        except Exception as error:
            self._failures.note(repr(error))
        zeros = (0.0,) * (len(self.terms) - 1)
        return [(candidate.predicted_ttft_seconds, *zeros) for candidate in candidates]

    def placed(self, arrival: Arrival, shard_id: str) -> None:
        try:
            self._policy.placed(arrival, shard_id)
        except Exception as error:
            self._failures.note(repr(error))


def _checked(costs: list[tuple[float, ...]], num_candidates: int, num_terms: int) -> list[tuple[float, ...]]:
    if len(costs) != num_candidates:
        raise ValueError(f"costs() returned {len(costs)} costs for {num_candidates} candidates")
    for terms in costs:
        if len(terms) != num_terms or not math.isfinite(sum(terms)):
            raise ValueError(f"costs() returned {terms!r} instead of {num_terms} finite numbers")
    return costs
