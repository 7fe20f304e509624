"""Which shard a request is placed on: filters, then a cost whose terms have names, then the cheapest shard.

placer.py        Placer: filters the shards, prices them with a policy, picks the cheapest
plan.py          the explanation of a placement
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
"""The names that `router.placement.policy` accepts; the same objects serve live traffic and simulations."""

__all__ = ["POLICIES", "Arrival", "Candidate", "PlacementPlan", "Policy", "ShardPlan"]
