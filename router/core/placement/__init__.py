"""Chooses the shard on which a request is placed: filters, then a cost whose terms have names, then the cheapest shard.

placer.py        Placer: prices the shards with a policy, picks the cheapest
cheapest.py      the shards that can be the cheapest, and no others
eligibility.py   which shards could run a request, and why others could not
candidates.py    a shard as a request sees it
plan.py          the explanation of a placement
predict.py       the prediction that a placement makes
policy.py        what a policy sees of a shard and of a request, and what it returns
ect.py           the default policy: estimated completion cost
reuse_curve.py   how likely idle blocks are to be used again, which prices an eviction
baselines.py     simple policies to compare with
peers.py         policies of other routers
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from router.core.placement.baselines import LeastPrefill, LeastRequests, RoundRobin, SessionHash
from router.core.placement.ect import Ect
from router.core.placement.peers import Conductor, Dynamo, Gaie, LMetric, SglangCacheAware
from router.core.placement.plan import PlacementPlan, ShardPlan
from router.core.placement.policy import Arrival, Candidate, Policy

POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    "ect": Ect,
    "conductor": Conductor,
    "dynamo": Dynamo,
    "dynamo_w16": partial(Dynamo, overlap_weight=16.0),
    "gaie": Gaie,
    "lmetric": LMetric,
    "sglang": SglangCacheAware,
    "session_hash": SessionHash,
    "least_prefill": LeastPrefill,
    "least_requests": LeastRequests,
    "round_robin": RoundRobin,
}
"""kvloom's own names for `router.placement.policy`, which also accepts those of plugins (router/placement_plugins.py).
The same objects serve live traffic and simulations."""


def built_in_policy(name: str) -> Policy:
    """A new policy of that name. Raises ValueError, which names those that exist."""
    if name not in POLICIES:
        raise ValueError(f"unknown placement policy {name!r}; there are: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()


__all__ = ["POLICIES", "Arrival", "Candidate", "PlacementPlan", "Policy", "ShardPlan", "built_in_policy"]
