"""Measures what a tenant that floods the fleet costs another one, in virtual time: the real router core and modelled
shards.

Both tenants send requests at random times. The calm one sends the same requests in every run: alone, and beside a
tenant that sends many times as many, more than the fleet can serve.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from lab.bench.modelled import RandomCalls, fleet_capacity, percentile, router_core
from lab.bench.overload import LENGTHS
from router.core.core import CoreConfig
from router.core.core_config import NO_OVERLOAD_CONTROL
from tools.simulate.fleet.fleet import FleetOptions
from tools.simulate.fleet.profile import PROFILES
from tools.simulate.runs import Curves
from tools.simulate.workload import Call, Outcome
from tools.simulate.world import simulate

CALM: Final = "calm"
FLOOD: Final = "flood"
_NUMBERS: Final = 10**6
"""The calls of the second tenant are numbered from here on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FairnessPlan:
    num_shards: int = 2
    profile: str = "70b"
    policy: str = "ect"
    calm_load: float = 0.2
    """The calm tenant asks for this share of what the fleet can serve."""
    flood_factor: float = 10.0
    """How many times as much the other tenant asks for."""
    seconds: float = 120.0
    """Virtual time during which requests arrive."""
    warm_up_seconds: float = 10.0
    """Arrivals of the first seconds are not counted: the flood begins in an empty fleet, as it does alone."""
    competing_prefill_seconds: float | None = None
    """In place of router.fairness.competing_prefill_seconds."""
    seed: int = 1


class TwoTenants:
    """The calls of both in the order of their arrival."""

    def __init__(self, plan: FairnessPlan, rate: float, *, has_flood: bool) -> None:
        self._calm = RandomCalls([(0.0, plan.seconds, rate)], LENGTHS, plan.seed)
        flood = RandomCalls([(0.0, plan.seconds, rate * plan.flood_factor)], LENGTHS, plan.seed + 1)
        self._flood = flood if has_flood else None
        self.block_size = self._calm.block_size

    def first_calls(self) -> Iterable[tuple[float, Call]]:
        return heapq.merge(
            _of(CALM, self._calm.first_calls(), 0),
            () if self._flood is None else _of(FLOOD, self._flood.first_calls(), _NUMBERS),
            key=lambda entry: entry[0],
        )

    def next_calls(self, ended: Call, now: float) -> Iterable[tuple[float, Call]]:  # noqa: ARG002  (open loop)
        return ()


def _of(tenant: str, calls: Iterable[tuple[float, Call]], first_number: int) -> Iterable[tuple[float, Call]]:
    for at, call in calls:
        hashes = [first_number * 1024 + block_hash for block_hash in call.block_hashes]
        yield (
            at,
            dataclasses.replace(call, call_id=first_number + call.call_id, tenant=tenant, block_hashes=hashes),
        )


def run(plan: FairnessPlan, curves: dict[str, Curves] | None = None) -> dict[str, Any]:
    """Measure the calm tenant alone, and both together with and without fair sharing. The calm tenant's TTFTs are added
    to `curves`."""
    capacity = fleet_capacity(plan.num_shards, plan.profile, LENGTHS, plan.seed)
    rate = plan.calm_load * capacity
    alone = _measure(plan, rate, has_flood=False, is_fair=True)
    fair = _measure(plan, rate, has_flood=True, is_fair=True)
    as_one = _measure(plan, rate, has_flood=True, is_fair=False)
    rows = [
        {"run": "alone", **_row(alone, CALM, plan)},
        {"run": "beside the flood", **_row(fair, CALM, plan)},
        {"run": "the flood itself", **_row(fair, FLOOD, plan)},
        {"run": "beside the flood, as one tenant", **_row(as_one, CALM, plan)},
    ]
    if curves is not None:
        for row, outcomes in zip((rows[0], rows[1], rows[3]), (alone, fair, as_one), strict=True):
            curves[row["run"]] = Curves(_ttfts(outcomes, CALM, plan), [])
    return {
        "capacity_per_second": round(capacity, 2),
        **dataclasses.asdict(plan),
        "rows": rows,
        "served_tokens_per_second": _served(fair, plan),
        "ttft_p99_rise": rise(rows[0], rows[1]),
    }


def rise(alone: Mapping[str, Any], beside: Mapping[str, Any]) -> float | None:
    """By how much of itself the TTFT's p99 is higher in the second row."""
    if alone["ttft_p99"] is None or beside["ttft_p99"] is None:
        return None
    return round(beside["ttft_p99"] / alone["ttft_p99"] - 1, 4)


def _measure(plan: FairnessPlan, rate: float, *, has_flood: bool, is_fair: bool) -> Sequence[Outcome]:
    options = FleetOptions(
        profile=PROFILES[plan.profile],
        num_shards=plan.num_shards,
        policy=plan.policy,
        seed=plan.seed,
        core_config=_core_config(plan),
        has_tenants=is_fair,
    )
    return simulate(TwoTenants(plan, rate, has_flood=has_flood), options).outcomes


def _core_config(plan: FairnessPlan) -> CoreConfig:
    fairness = router_core().fairness
    assert fairness is not None
    if plan.competing_prefill_seconds is not None:
        fairness = msgspec.structs.replace(fairness, competing_prefill_seconds=plan.competing_prefill_seconds)
    return router_core(
        fairness=fairness,
        policy=plan.policy,
        overload=msgspec.structs.replace(NO_OVERLOAD_CONTROL, sheds_load_early=True),
    )


def _row(outcomes: Sequence[Outcome], tenant: str, plan: FairnessPlan) -> dict[str, Any]:
    counted = [one for one in outcomes if one.call.tenant == tenant and one.arrived_at >= plan.warm_up_seconds]
    good = _ttfts(outcomes, tenant, plan)
    num_tokens = sum(one.call.num_output_tokens for one in counted if not one.failed)
    return {
        "requests": len(counted),
        "answered": len(good),
        "tokens_per_second": round(num_tokens / (plan.seconds - plan.warm_up_seconds), 1),
        "ttft_p50": percentile(good, 0.5),
        "ttft_p99": percentile(good, 0.99),
    }


def _ttfts(outcomes: Sequence[Outcome], tenant: str, plan: FairnessPlan) -> list[float]:
    return sorted(
        one.ttft_seconds
        for one in outcomes
        if one.call.tenant == tenant and one.arrived_at >= plan.warm_up_seconds and not one.failed
    )


def _served(outcomes: Sequence[Outcome], plan: FairnessPlan) -> float:
    """Prompt and output tokens, of both tenants, of the answers that ended while requests arrived."""
    ended = [one.call for one in outcomes if not one.failed and plan.warm_up_seconds <= one.finished_at <= plan.seconds]
    num_tokens = sum(call.num_prompt_tokens + call.num_output_tokens for call in ended)
    return round(num_tokens / (plan.seconds - plan.warm_up_seconds), 1)
