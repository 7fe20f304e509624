"""Where a request goes, and why: filters, then a cost whose terms have names, then the cheapest shard."""

from router.core.placement.plan import Plan, ShardPlan
from router.core.placement.policies import POLICIES, Candidate, Policy

__all__ = ["POLICIES", "Candidate", "Plan", "Policy", "ShardPlan"]
