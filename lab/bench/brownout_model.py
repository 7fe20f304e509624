"""A time of overload with the brownout ladder and without, in virtual time: the real router core, modelled shards.

Requests arrive at a normal load, then at a multiple of what the fleet can serve, then at a normal load again. An
interactive request is good when its first token comes within the objective and its answer comes to its end. Load 1 is
the rate that the fleet completes when requests never run out and no answer is degraded.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvloom_common.config import BrownoutConfig, BrownoutStepConfig, KvloomConfig
from lab.bench.plots import Timeline
from router.core.actions import Action, BrownoutStepChanged, RequestDegraded, SubmitAttempt
from router.core.core import CoreConfig
from router.core_config import core_config
from tools.simulate.fleet.fleet import FleetOptions
from tools.simulate.fleet.profile import PROFILES
from tools.simulate.workload import Call, Outcome
from tools.simulate.world import simulate

BLOCK_SIZE: Final = 64
MEAN_PROMPT_TOKENS: Final = 800.0
MEAN_OUTPUT_TOKENS: Final = 500.0
"""Longer answers than in `overload_model.py`, as of a model that writes or reasons: what a cap can save."""
SPREAD: Final = 0.8
"""Standard deviation of the logarithms of prompt and answer lengths."""
MAX_PROMPT_TOKENS: Final = 16_000
MAX_OUTPUT_TOKENS: Final = 4000
SATURATING_RATE: Final = 200.0
"""Requests per second and shard in the run that measures the fleet's capacity."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BrownoutPlan:
    num_shards: int = 1
    profile: str = "70b"
    load: float = 3.0
    """During the overload, as a multiple of the fleet's capacity."""
    normal_load: float = 0.5
    batch_share: float = 0.4
    """The share of requests in the batch tier."""
    overload_seconds: float = 240.0
    """A quarter of it is the normal time before, and as long as it is the time after."""
    ttft_slo_seconds: float = 2.0
    seed: int = 1

    @property
    def phases(self) -> Sequence[tuple[str, float, float, float]]:
        """(name, begin, end, load) of each, in seconds."""
        begin = self.overload_seconds / 4
        end = begin + self.overload_seconds
        return (
            ("before", 0.0, begin, self.normal_load),
            ("overload", begin, end, self.load),
            ("after", end, end + self.overload_seconds, self.normal_load),
        )


class PhasedCalls:
    """Independent requests of random lengths, at a rate that changes from phase to phase."""

    block_size = BLOCK_SIZE

    def __init__(self, plan: BrownoutPlan, phases: Sequence[tuple[float, float, float]], max_calls: int) -> None:
        """`phases`: (begin, end, requests per second) of each."""
        self._plan = plan
        self._phases = phases
        self._max_calls = max_calls

    def first_calls(self) -> Iterable[tuple[float, Call]]:
        seed, call_id = self._plan.seed, 0
        arrivals, calls = random.Random(f"{seed} arrivals"), random.Random(f"{seed} calls")
        for begin, end, rate in self._phases:
            at = begin + arrivals.expovariate(rate)
            while at < end and call_id < self._max_calls:
                yield at, self._call(call_id, calls)
                call_id += 1
                at += arrivals.expovariate(rate)

    def next_calls(self, ended: Call, now: float) -> Iterable[tuple[float, Call]]:  # noqa: ARG002  (open loop)
        return ()

    def _call(self, call_id: int, rng: random.Random) -> Call:
        num_prompt_tokens = _length(rng, MEAN_PROMPT_TOKENS, MAX_PROMPT_TOKENS)
        num_output_tokens = _length(rng, MEAN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS)
        hashes = [call_id * 1024 + i for i in range(num_prompt_tokens // BLOCK_SIZE)]
        is_batch = rng.random() < self._plan.batch_share
        return Call(call_id, num_prompt_tokens, num_output_tokens, hashes, is_batch=is_batch)


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
    """Return the requests per second that the fleet completes when requests never run out."""
    num_calls = 2000 * plan.num_shards
    workload = PhasedCalls(plan, [(0.0, math.inf, SATURATING_RATE * plan.num_shards)], num_calls)
    options = FleetOptions(
        profile=PROFILES[plan.profile], num_shards=plan.num_shards, policy="least_requests", seed=plan.seed
    )
    ends = sorted(outcome.finished_at for outcome in simulate(workload, options).outcomes)
    # The first answers are left out because batches are still filling up, the last because batches run empty.
    first, last = ends[len(ends) // 4], ends[3 * len(ends) // 4]
    return (len(ends) // 2) / (last - first)


def measure(
    plan: BrownoutPlan, capacity: float, steps: Sequence[BrownoutStepConfig]
) -> tuple[dict[str, Any], Timeline]:
    """Measure all phases with these steps, or without a ladder."""
    notes = _Notes()
    options = FleetOptions(
        profile=PROFILES[plan.profile],
        num_shards=plan.num_shards,
        policy="ect",
        seed=plan.seed,
        core_config=_core_config(plan, steps),
        on_action=notes.on_action,
    )
    phases = [(begin, end, load * capacity) for _, begin, end, load in plan.phases]
    outcomes = simulate(PhasedCalls(plan, phases, 10**9), options).outcomes
    report = {
        "phases": [
            {"phase": name, "load": load}
            | _row([one for one in outcomes if begin <= one.arrived_at < end], end - begin, plan, notes)
            for name, begin, end, load in plan.phases
        ],
        "steps": notes.steps,
        "effects": notes.effects,
    }
    interactive = [one for one in outcomes if not one.call.is_batch]
    return report, Timeline([(one.arrived_at, _is_good(one, plan)) for one in interactive], notes.steps)


def run(plan: BrownoutPlan, timelines: dict[str, Timeline]) -> dict[str, Any]:
    """Measure with the default ladder, with its last step alone, which only refuses, and without any. `timelines` gets
    each run."""
    capacity, ladder = find_capacity(plan), BrownoutConfig().steps
    reports: dict[str, dict[str, Any]] = {}
    for name, steps in (("ladder", ladder), ("refusals_only", ladder[-1:]), ("without", ())):
        reports[name], timelines[name] = measure(plan, capacity, steps)
    return {"capacity_per_second": round(capacity, 2), **dataclasses.asdict(plan), **reports}


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
        "good_share": _share(len(good), len(interactive)),
        "refused_share": _share(len(interactive) - len(answered), len(interactive)),
        "ttft_p50": _percentile([one.ttft_seconds for one in answered], 0.5),
        "ttft_p95": _percentile([one.ttft_seconds for one in answered], 0.95),
        "mean_output_tokens": round(sum(num_tokens) / len(num_tokens)) if num_tokens else None,
        "batch_answered_share": _share(sum(not one.failed for one in batch), len(batch)),
    }


def _core_config(plan: BrownoutPlan, steps: Sequence[BrownoutStepConfig]) -> CoreConfig:
    """The router's defaults, without a safety service."""
    ladder = BrownoutConfig(enabled=True, ttft_slo_seconds=plan.ttft_slo_seconds, steps=list(steps)) if steps else None
    return dataclasses.replace(
        core_config(KvloomConfig()),
        answer_mode="off",
        safety_required=False,
        decision_sample_share=0.0,
        health=None,
        brownout=ladder,
    )


def _share(count: int, of: int) -> float | None:
    return round(count / of, 4) if of else None


def _percentile(values: Sequence[float], share: float) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3)


def _length(rng: random.Random, mean: float, most: int) -> int:
    return max(1, min(most, round(rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD))))
