"""Goodput under overload in virtual time: the real router core, modelled shards, and clients with deadlines.

A request is good when its last token arrives within its deadline, counted from its arrival. Load 1 is the rate that the
fleet completes when requests never run out and have no deadline.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvloom_common.config import KvloomConfig
from router.core.core import CoreConfig
from router.core.core_config import NO_OVERLOAD_CONTROL
from router.core_config import core_config
from tools.simulate.fleet.fleet import FleetOptions
from tools.simulate.fleet.profile import PROFILES
from tools.simulate.workload import Call, Outcome
from tools.simulate.world import simulate

BLOCK_SIZE: Final = 64
MEAN_PROMPT_TOKENS: Final = 2000.0
MEAN_OUTPUT_TOKENS: Final = 150.0
SPREAD: Final = 0.8
"""Standard deviation of the logarithms of prompt and answer lengths."""
MAX_PROMPT_TOKENS: Final = 32_000
MAX_OUTPUT_TOKENS: Final = 2000
WARM_UP_SHARE: Final = 0.25
"""Share of the virtual time whose arrivals are not counted."""
SATURATING_RATE: Final = 200.0
"""Requests per second and shard in the run that measures the fleet's capacity."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OverloadPlan:
    num_shards: int = 2
    profile: str = "70b"
    policy: str = "ect"
    deadline_seconds: float = 20.0
    seconds: float = 120.0
    """Virtual time during which requests arrive."""
    seed: int = 1
    loads: Sequence[float] = (0.5, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0)


class PoissonCalls:
    """Independent requests of random lengths: no two prompts share a prefix."""

    block_size = BLOCK_SIZE

    def __init__(self, rate: float, seconds: float, seed: int, max_calls: int = 10**9) -> None:
        self._rate = rate
        self._seconds = seconds
        self._seed = seed
        self._max_calls = max_calls

    def first_calls(self) -> Iterable[tuple[float, Call]]:
        arrivals, lengths = random.Random(f"{self._seed} arrivals"), random.Random(f"{self._seed} lengths")
        at = 0.0
        for call_id in range(self._max_calls):
            at += arrivals.expovariate(self._rate)
            if at > self._seconds:
                return
            num_prompt_tokens = _length(lengths, MEAN_PROMPT_TOKENS, MAX_PROMPT_TOKENS)
            num_output_tokens = _length(lengths, MEAN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS)
            hashes = [call_id * 1024 + i for i in range(num_prompt_tokens // BLOCK_SIZE)]
            yield at, Call(call_id, num_prompt_tokens, num_output_tokens, hashes)

    def next_calls(self, ended: Call, now: float) -> Iterable[tuple[float, Call]]:  # noqa: ARG002  (open loop)
        return ()


def find_capacity(plan: OverloadPlan) -> float:
    """Return the requests per second that the fleet completes when requests never run out."""
    rate = SATURATING_RATE * plan.num_shards
    num_calls = int(plan.seconds * 20 * plan.num_shards)
    options = FleetOptions(
        profile=PROFILES[plan.profile], num_shards=plan.num_shards, policy="least_requests", seed=plan.seed
    )
    result = simulate(PoissonCalls(rate, math.inf, plan.seed, num_calls), options)
    ends = sorted(outcome.finished_at for outcome in result.outcomes)
    # The first answers are left out because batches are still filling up, the last because batches run empty.
    first, last = ends[len(ends) // 4], ends[3 * len(ends) // 4]
    return (len(ends) // 2) / (last - first)


def measure(plan: OverloadPlan, capacity: float, load: float, *, sheds_early: bool) -> dict[str, Any]:
    """Measure one row of the table."""
    options = FleetOptions(
        profile=PROFILES[plan.profile],
        num_shards=plan.num_shards,
        policy=plan.policy,
        seed=plan.seed,
        core_config=_core_config(plan, sheds_early=sheds_early),
    )
    outcomes = simulate(PoissonCalls(load * capacity, plan.seconds, plan.seed), options).outcomes
    begin = WARM_UP_SHARE * plan.seconds
    counted = [outcome for outcome in outcomes if outcome.arrived_at >= begin]
    good = [outcome for outcome in counted if not outcome.failed]
    refused = [outcome for outcome in counted if outcome.failed and outcome.finished_at == outcome.arrived_at]
    return {
        "load": load,
        "requests_per_second": round(load * capacity, 2),
        "goodput_per_second": round(len(good) / (plan.seconds - begin), 2),
        "good_share": round(len(good) / len(counted), 4),
        "refused_at_once_share": round(len(refused) / len(counted), 4),
        "given_up_late_share": round((len(counted) - len(good) - len(refused)) / len(counted), 4),
        "ttft_p50": _percentile([outcome.ttft_seconds for outcome in good], 0.5),
        "ttft_p99": _percentile([outcome.ttft_seconds for outcome in good], 0.99),
        "wasted_share": _wasted_share(counted),
    }


def run(plan: OverloadPlan) -> dict[str, Any]:
    """Measure every load with and without early shedding."""
    capacity = find_capacity(plan)
    runs = {
        name: [measure(plan, capacity, load, sheds_early=sheds_early) for load in plan.loads]
        for name, sheds_early in (("shedding", True), ("without", False))
    }
    return {
        "capacity_per_second": round(capacity, 2),
        "deadline_seconds": plan.deadline_seconds,
        "num_shards": plan.num_shards,
        "profile": plan.profile,
        "policy": plan.policy,
        "seed": plan.seed,
        "goodput_kept": {name: _kept(rows) for name, rows in runs.items()},
        **runs,
    }


def _kept(rows: Sequence[dict[str, Any]]) -> float:
    """Goodput at the highest load, relative to the peak."""
    peak = max(row["goodput_per_second"] for row in rows)
    return round(rows[-1]["goodput_per_second"] / peak, 4) if peak else 0.0


def _core_config(plan: OverloadPlan, *, sheds_early: bool) -> CoreConfig:
    """The router's defaults, except for the deadline, and without a safety service."""
    defaults = core_config(KvloomConfig())
    overload = defaults.overload if sheds_early else NO_OVERLOAD_CONTROL
    return dataclasses.replace(
        defaults,
        policy=plan.policy,
        request_timeout_seconds=plan.deadline_seconds,
        answer_mode="off",
        safety_required=False,
        decision_sample_share=0.0,
        health=None,
        overload=overload,
    )


def _wasted_share(outcomes: Sequence[Outcome]) -> float:
    """Returns the share of the prompt tokens sent to shards that belongs to requests which missed their deadline."""
    sent = [o for o in outcomes if not o.failed or o.ttft_seconds < o.finished_at - o.arrived_at]
    num_tokens = sum(outcome.call.num_prompt_tokens for outcome in sent)
    num_wasted = sum(outcome.call.num_prompt_tokens for outcome in sent if outcome.failed)
    return round(num_wasted / num_tokens, 4) if num_tokens else 0.0


def _percentile(values: Sequence[float], share: float) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3)


def _length(rng: random.Random, mean: float, most: int) -> int:
    return max(1, min(most, round(rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD))))
