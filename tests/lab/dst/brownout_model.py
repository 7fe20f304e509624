"""A time of overload with the brownout ladder and without, in virtual time: the real router core, modelled shards.

Requests arrive at a normal load, then at a multiple of what the fleet can serve, then at a normal load again. An
interactive request is good when its first token comes within the objective and its answer comes to its end. Load 1 is
the rate that the fleet completes when requests never run out and no answer is degraded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from kvloom_common.config import BrownoutStepConfig
from lab.bench.modelled import Lengths, RandomCalls, fleet_capacity, percentile, router_core, share_of
from router.core.actions import Action, BrownoutStepChanged, RequestDegraded, SubmitAttempt
from router.core.rule_settings import BrownoutSettings
from tools.simulate.fleet.fleet import FleetOptions
from tools.simulate.fleet.profile import PROFILES
from tools.simulate.workload import Outcome
from tools.simulate.world import simulate

MEAN_OUTPUT_TOKENS: Final = 500.0
"""Longer answers than those of `overload_model.py`, as of a model that writes or reasons: what a cap can save."""
NORMAL_LOAD: Final = 0.5
_CALLS_PER_SHARD: Final = 2000


def phases_of(overload_seconds: float, load: float) -> Sequence[tuple[str, float, float, float]]:
    """The name, the begin and the end (in seconds) and the load of each phase. A quarter of the overload's time is
    normal before it, and as long as it takes is normal after it."""
    begin = overload_seconds / 4
    end = begin + overload_seconds
    return (
        ("before", 0.0, begin, NORMAL_LOAD),
        ("overload", begin, end, load),
        ("after", end, end + overload_seconds, NORMAL_LOAD),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BrownoutPlan:
    num_shards: int = 1
    profile: str = "70b"
    load: float = 3.0
    """During the overload, as a multiple of the fleet's capacity."""
    batch_share: float = 0.4
    """The share of requests in the batch tier."""
    overload_seconds: float = 240.0
    ttft_slo_seconds: float = 2.0
    seed: int = 1

    @property
    def phases(self) -> Sequence[tuple[str, float, float, float]]:
        return phases_of(self.overload_seconds, self.load)

    @property
    def lengths(self) -> Lengths:
        return Lengths("calls", 800.0, MEAN_OUTPUT_TOKENS, 16_000, 4000, self.batch_share)


class _Notes:
    """Notes what the router core did, besides the outcomes of calls."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        """(time, step) of every change."""
        self.effects: dict[str, int] = {}
        self.max_tokens: dict[int, int] = {}
        """By call: the most output tokens that its shard was allowed."""

    def on_action(self, action: Action, now: float) -> None:
        if isinstance(action, SubmitAttempt):
            self.max_tokens[int(action.request.request_id)] = action.max_tokens
        elif isinstance(action, BrownoutStepChanged):
            self.steps.append((round(now, 1), action.step))
        elif isinstance(action, RequestDegraded):
            for effect in action.effects:
                self.effects[effect] = self.effects.get(effect, 0) + 1


def find_capacity(plan: BrownoutPlan) -> float:
    """The requests per second that the fleet completes when requests never run out."""
    return fleet_capacity(plan.num_shards, plan.profile, plan.lengths, plan.seed, _CALLS_PER_SHARD)


def measure(plan: BrownoutPlan, capacity: float, steps: Sequence[BrownoutStepConfig]) -> dict[str, Any]:
    """Measure all phases with these steps, or without a ladder."""
    notes = _Notes()
    options = FleetOptions(
        profile=PROFILES[plan.profile],
        num_shards=plan.num_shards,
        policy="ect",
        seed=plan.seed,
        core_config=router_core(brownout=_ladder(plan, steps)),
        on_action=notes.on_action,
    )
    phases = [(begin, end, load * capacity) for _, begin, end, load in plan.phases]
    outcomes = simulate(RandomCalls(phases, plan.lengths, plan.seed), options).outcomes
    return {
        "phases": [
            {"phase": name, "load": load}
            | _row([one for one in outcomes if begin <= one.arrived_at < end], end - begin, plan, notes)
            for name, begin, end, load in plan.phases
        ],
        "steps": notes.steps,
        "effects": notes.effects,
    }


def _is_good(outcome: Outcome, plan: BrownoutPlan) -> bool:
    return not outcome.failed and outcome.ttft_seconds <= plan.ttft_slo_seconds


def _row(outcomes: Sequence[Outcome], seconds: float, plan: BrownoutPlan, notes: _Notes) -> dict[str, Any]:
    interactive = [one for one in outcomes if not one.call.is_batch]
    batch = [one for one in outcomes if one.call.is_batch]
    answered = [one for one in interactive if not one.failed]
    good = [one for one in answered if _is_good(one, plan)]
    num_tokens = [min(one.call.num_output_tokens, notes.max_tokens[one.call.call_id]) for one in answered]
    return {
        "interactive_per_second": round(len(interactive) / seconds, 2),
        "goodput_per_second": round(len(good) / seconds, 2),
        "good_share": share_of(len(good), len(interactive)),
        "refused_share": share_of(len(interactive) - len(answered), len(interactive)),
        "ttft_p50": percentile([one.ttft_seconds for one in answered], 0.5),
        "ttft_p95": percentile([one.ttft_seconds for one in answered], 0.95),
        "mean_output_tokens": round(sum(num_tokens) / len(num_tokens)) if num_tokens else None,
        "batch_answered_share": share_of(sum(not one.failed for one in batch), len(batch)),
    }


def _ladder(plan: BrownoutPlan, steps: Sequence[BrownoutStepConfig]) -> BrownoutSettings | None:
    return BrownoutSettings(enabled=True, ttft_slo_seconds=plan.ttft_slo_seconds, steps=list(steps)) if steps else None
