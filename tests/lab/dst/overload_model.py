"""Goodput under overload, in virtual time and with clients that have deadlines.

A request is good when its last token arrives within its deadline, counted from its arrival. Load 1 is the rate that the
fleet completes when requests never run out and have no deadline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from lab.bench.modelled import Lengths, RandomCalls, fleet_capacity, percentile, router_core, share_of
from router.core.core_config import NO_OVERLOAD_CONTROL
from router.core.rule_settings import OverloadSettings
from tools.simulate.fleet.fleet import FleetOptions
from tools.simulate.fleet.profile import PROFILES
from tools.simulate.workload import Outcome
from tools.simulate.world import simulate

LENGTHS: Final = Lengths("lengths", 2000.0, 150.0, 32_000, 2000)
WARM_UP_SHARE: Final = 0.25
"""Share of the virtual time whose arrivals are not counted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OverloadPlan:
    num_shards: int = 2
    profile: str = "70b"
    policy: str = "ect"
    deadline_seconds: float = 20.0
    seconds: float = 120.0
    """Virtual time during which requests arrive."""
    seed: int = 1


def find_capacity(plan: OverloadPlan) -> float:
    """The requests per second that the fleet completes when requests never run out."""
    return fleet_capacity(plan.num_shards, plan.profile, LENGTHS, plan.seed)


def measure(plan: OverloadPlan, capacity: float, load: float, *, sheds_load_early: bool) -> dict[str, Any]:
    """Measure one row of the table."""
    options = FleetOptions(
        profile=PROFILES[plan.profile],
        num_shards=plan.num_shards,
        policy=plan.policy,
        seed=plan.seed,
        core_config=router_core(
            policy=plan.policy,
            request_timeout_seconds=plan.deadline_seconds,
            overload=_overload(sheds_load_early=sheds_load_early),
        ),
    )
    outcomes = simulate(RandomCalls([(0.0, plan.seconds, load * capacity)], LENGTHS, plan.seed), options).outcomes
    begin = WARM_UP_SHARE * plan.seconds
    counted = [outcome for outcome in outcomes if outcome.arrived_at >= begin]
    good = [outcome for outcome in counted if not outcome.failed]
    refused = [outcome for outcome in counted if outcome.failed and outcome.finished_at == outcome.arrived_at]
    return {
        "load": load,
        "requests_per_second": round(load * capacity, 2),
        "goodput_per_second": round(len(good) / (plan.seconds - begin), 2),
        "good_share": share_of(len(good), len(counted)),
        "refused_at_once_share": share_of(len(refused), len(counted)),
        "given_up_late_share": share_of(len(counted) - len(good) - len(refused), len(counted)),
        "ttft_p50": percentile([outcome.ttft_seconds for outcome in good], 0.5),
        "ttft_p99": percentile([outcome.ttft_seconds for outcome in good], 0.99),
        "wasted_share": _wasted_share(counted),
    }


def _overload(*, sheds_load_early: bool) -> OverloadSettings:
    return router_core().overload if sheds_load_early else NO_OVERLOAD_CONTROL


def _wasted_share(outcomes: Sequence[Outcome]) -> float:
    """Returns the share of the prompt tokens sent to shards that belongs to requests which missed their deadline."""
    sent = [o for o in outcomes if not o.failed or o.ttft_seconds < o.finished_at - o.arrived_at]
    num_tokens = sum(outcome.call.num_prompt_tokens for outcome in sent)
    num_wasted = sum(outcome.call.num_prompt_tokens for outcome in sent if outcome.failed)
    return share_of(num_wasted, num_tokens) or 0.0
