"""Draws what a seed determines in advance: sizes, settings, and the kinds and rates of faults."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Final

from kvloom_common.config import BrownoutStepConfig
from lab.dst.script import ScriptedSampling
from router.core.core import CoreConfig
from router.core.dispatch.prefill_chunks import PrefillChunkSettings
from router.core.dispatch.prefill_handoffs import HandoffAbilities
from router.core.placement import POLICIES
from router.core.priority_classes import PriorityClass
from router.core.rule_settings import (
    NO_RAMP,
    BrownoutSettings,
    DisaggregationSettings,
    FairnessSettings,
    HealthSettings,
    OverloadSettings,
)

MODELS: Final = ("model-a", "model-b", "model-c", "model-d", "model-e")
"""The names of all models that shards may serve. The first ones are there from the beginning."""

FAULTS_PER_SECOND: Final[dict[str, float]] = {
    "shard_crash": 0.6,
    "shard_reincarnation": 0.4,
    "shard_slow": 0.5,
    "shard_hung": 0.4,
    "engine_hung": 0.8,
    "shard_draining": 0.5,
    "cache_cleared": 0.4,
    "stream_break": 0.5,
    "link_partition": 0.6,
    "late_frame": 1.5,
    "malformed_frame": 0.3,
    "client_cancels_choice": 4.0,
    "client_cancels_request": 3.0,
    "client_leaves": 1.0,
    "client_stops_reading": 0.8,
    "duplicate_request_id": 1.5,
    "reused_request_id": 3.0,
    "burst": 0.8,
    "router_restart": 0.25,
    "router_draining": 0.2,
    "router_pause": 0.5,
    "safety_down": 2.0,
    "safety_slow": 0.5,
    "safety_policy_change": 0.5,
    "shard_hands_over": 0.6,
    "router_drain_deadline": 0.3,
    "fleet_outage": 0.4,
    "spot_notice": 0.8,
    "scale_in": 0.5,
}
"""The kinds that strike by themselves, and their rates in a seed that has them at all."""

MODEL_CHANGES_PER_SECOND: Final[dict[str, float]] = {
    "model_loaded": 1.5,
    "model_unloaded": 1.5,
    "unload_taken_back": 0.7,
}
"""An operator does this while traffic runs, in about a third of the seeds. It is counted when it has been done."""

ADAPTER_CHANGES_PER_SECOND: Final[dict[str, float]] = {
    "adapter_loaded": 6.0,
    "adapter_unloaded": 1.5,
    "adapter_replaced": 1.0,
}
"""An operator does this while traffic runs, in about a quarter of the seeds; in the others there are no adapters."""

ROLLOUT_CHANGES_PER_SECOND: Final[dict[str, float]] = {
    "rollout_begun": 2.0,
    "rollout_taken_back": 0.1,
    "new_version_fails": 0.2,
    "old_version_slow": 0.3,
    "supervisor_killed": 0.1,
    "supervisor_hung": 0.2,
    "registry_lost": 0.2,
    "edge_cut_off": 0.4,
}
"""Rollouts of new versions, in about a fifth of the seeds, and what befalls them; each of these seeds has a part of
it."""

LIMITS_SHARE: Final = 0.15
"""The share of seeds in which tenants have limits and budgets."""

ROLES_SHARE: Final = 0.1
"""The share of seeds in which shards have roles in disaggregated prefill."""

NOTICES_SHARE: Final = 0.05
"""The share of seeds in which shards get notice more than anything else happens."""

ROLLOUT_OUTCOMES: Final = ("rollout_done", "rollout_rolled_back", "rollout_failed")

REGISTRY_FAULTS_PER_SECOND: Final[dict[str, float]] = {
    "registry_garbage": 1.0,
    "registry_stale": 1.0,
    "registry_name_twice": 0.7,
    "registry_removed": 1.0,
    "registry_down": 0.5,
}
"""The kinds that need a registry, which about a third of the seeds have; in the others routers know all shards."""

FAULTS_PER_CHANCE: Final[dict[str, float]] = {
    "engine_failure": 0.004,
    "kv_events_lost": 0.1,
    "kv_events_duplicated": 0.1,
    "kv_events_reordered": 0.1,
    "load_report_lost": 0.3,
    "load_report_stale": 0.2,
    "late_finish": 0.2,
    "impossible_request": 0.04,
    "unknown_model": 0.02,
    "resumed_request": 0.12,
}
"""The kinds that may strike at every opportunity, and their probabilities."""

OWN_DRAWS: Final = frozenset({"shard_hands_over", "router_drain_deadline", "fleet_outage", "spot_notice", "scale_in"})
"""Kinds with generators of their own: adding them did not change the rest of a seed's scenario."""

FAULT_KINDS: Final = (
    *FAULTS_PER_SECOND,
    *MODEL_CHANGES_PER_SECOND,
    *ADAPTER_CHANGES_PER_SECOND,
    *ROLLOUT_CHANGES_PER_SECOND,
    *ROLLOUT_OUTCOMES,
    *REGISTRY_FAULTS_PER_SECOND,
    *FAULTS_PER_CHANCE,
)

HARMLESS_KINDS: Final = frozenset(
    {
        *MODEL_CHANGES_PER_SECOND,
        *(ROLLOUT_CHANGES_PER_SECOND.keys() - {"new_version_fails", "supervisor_killed"}),
        "burst",
        "client_cancels_choice",
        "resumed_request",
    }
)
"""Kinds that are no reason for an admitted request to end without an answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShardShape:
    model: str
    block_size: int
    num_blocks: int
    max_batch: int
    max_model_len: int
    max_sequences: int
    variant: str = ""
    """See ShardInfo.variant in shard_service.proto."""
    has_scarce_blocks: bool = False
    """True when sequences wait, and are preempted by the engine, when all blocks are held."""
    role: str = ""
    """See ShardInfo.role."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    config: CoreConfig
    num_routers: int
    shards: tuple[ShardShape, ...]
    clients_per_router: int
    tenants: tuple[str, ...]
    tenant_weights: tuple[float, ...]
    requests_per_second: float
    latency_seconds: float
    step_seconds: float
    max_waiting_entries: int
    """The size of a client's outbox in the router."""
    chaos_seconds: float
    batch_share: float
    """The share of requests in the batch tier."""
    num_epochs: int
    """How many periods of faults there are, each followed by a period without."""
    rates: Mapping[str, float]
    """Kind of fault to rate per second, or to probability. Kinds that this seed does not have are left out."""
    has_result_cache: bool = False
    """True when routers keep answers, and clients repeat requests."""
    kv_shares: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Tenant → its guaranteed share of every shard's blocks, in percent. Tenants without one are left out."""

    @property
    def has_model_changes(self) -> bool:
        return not MODEL_CHANGES_PER_SECOND.keys().isdisjoint(self.rates)

    @property
    def has_rollouts(self) -> bool:
        return "rollout_begun" in self.rates

    @property
    def is_harmless(self) -> bool:
        """True when nothing happens that breaks off an answer."""
        return self.rates.keys() <= HARMLESS_KINDS

    @property
    def has_registry(self) -> bool:
        return not REGISTRY_FAULTS_PER_SECOND.keys().isdisjoint(self.rates)


DEFAULT_POLICY: Final = CoreConfig().policy


def has_limits(seed: int) -> bool:
    return random.Random(f"{seed} has limits").random() < LIMITS_SHARE


def draw_scenario(seed: int, rng: random.Random) -> Scenario:
    """Every seed has about half of the faults, so that bugs that a frequent fault masks are found without it."""
    share = rng.choice((0.25, 0.5, 0.5, 0.75))
    rates: dict[str, float] = {}
    for kind, rate in (*FAULTS_PER_SECOND.items(), *FAULTS_PER_CHANCE.items()):
        drawn_by = random.Random(f"{seed} {kind}") if kind in OWN_DRAWS else rng
        if drawn_by.random() < share:
            factor = drawn_by.choice((0.5, 1.0, 3.0) if rate < 1 else (0.5, 1.0))
            rates[kind] = min(0.9, rate * factor) if rate < 1 else rate * factor
    rates |= _draw_registry_rates(random.Random(f"{seed} registry rates"))
    if random.Random(f"{seed} adapters").random() < 0.25:
        rates |= ADAPTER_CHANGES_PER_SECOND
    num_tenants = rng.choice((1, 2, 2, 3, 4))
    num_epochs = rng.choice((1, 1, 2))
    model_rng = random.Random(f"{seed} models")
    scenario = Scenario(
        seed=seed,
        config=_draw_config(seed, rng),
        num_routers=rng.choice((1, 1, 1, 2, 3)),
        shards=_give_roles(
            random.Random(f"{seed} roles"),
            _make_scarce(random.Random(f"{seed} blocks"), _divide(model_rng, _draw_shards(rng))),
        ),
        clients_per_router=rng.choice((1, 2, 3)),
        tenants=tuple(f"tenant-{i}" for i in range(num_tenants)),
        tenant_weights=(rng.choice((1.0, 8.0)), *([1.0] * (num_tenants - 1))),
        requests_per_second=rng.choice((15.0, 40.0, 80.0)),
        latency_seconds=rng.choice((0.0005, 0.003, 0.02)),
        step_seconds=rng.choice((0.01, 0.03)),
        max_waiting_entries=rng.choice((40, 65_536)),
        chaos_seconds=rng.choice((0.5, 1.0, 1.5)) / num_epochs,
        batch_share=random.Random(f"{seed} tiers").choice((0.0, 0.0, 0.3, 0.6)),
        num_epochs=num_epochs,
        rates=rates,
        has_result_cache=random.Random(f"{seed} result cache").random() < 0.2,
        kv_shares=_draw_kv_shares(random.Random(f"{seed} kv shares"), num_tenants),
    )
    scenario = _with_rollouts(random.Random(f"{seed} rollouts"), _with_model_changes(model_rng, scenario))
    scenario = _with_notices(random.Random(f"{seed} departures"), scenario)
    if scenario.config.classes and not any(one.reserved_share for one in scenario.config.classes):
        # A class starves only while others have more to do than the fleet can, for longer than a burst.
        return dataclasses.replace(scenario, requests_per_second=80.0, chaos_seconds=scenario.chaos_seconds + 1.0)
    return scenario


def _draw_kv_shares(rng: random.Random, num_tenants: int) -> dict[str, int]:
    """In an eighth of the seeds some tenants have one, but never the last."""
    if rng.random() > 0.125:
        return {}
    return {f"tenant-{i}": rng.choice((10, 20, 30)) for i in range(num_tenants - 1) if rng.random() < 0.8}


def _divide(rng: random.Random, shards: tuple[ShardShape, ...]) -> tuple[ShardShape, ...]:
    """In a quarter of the seeds with several shards they serve two or three models, which have other sizes."""
    if len(shards) < 2 or rng.random() < 0.75:
        return shards
    num_models = min(len(shards), rng.choice((2, 3, 3)))
    sizes = {model: (rng.choice((4, 8)), rng.choice((64, 96))) for model in MODELS[1:num_models]}
    divided = list(shards)
    for i, shard in enumerate(shards):
        model = MODELS[i % num_models]
        block_size, max_model_len = sizes.get(model, (shard.block_size, shard.max_model_len))
        divided[i] = dataclasses.replace(shard, model=model, block_size=block_size, max_model_len=max_model_len)
    return tuple(divided)


def _with_model_changes(rng: random.Random, scenario: Scenario) -> Scenario:
    """In some seeds models are loaded and unloaded, and in some of these little else happens: what an unload must not
    break would then have ended well. A model can only be unloaded beside others, and takes a while to."""
    if rng.random() < 0.65:
        return scenario
    changes = {kind: rate * rng.choice((0.5, 1.0)) for kind, rate in MODEL_CHANGES_PER_SECOND.items()}
    rates = {kind: rate for kind, rate in scenario.rates.items() if kind in HARMLESS_KINDS}
    if rng.random() < 0.75:
        rates = dict(scenario.rates)
    chaos_seconds = scenario.chaos_seconds + 1.5 / scenario.num_epochs
    return dataclasses.replace(scenario, rates={**rates, **changes}, chaos_seconds=chaos_seconds)


def _with_rollouts(rng: random.Random, scenario: Scenario) -> Scenario:
    """In some seeds versions are rolled out, and in some of these little else happens. A rollout takes a while, and so
    does what follows its end."""
    if rng.random() < 0.8:
        return scenario
    befalls = {kind: rate for kind, rate in ROLLOUT_CHANGES_PER_SECOND.items() if rng.random() < 0.35}
    rates = {**scenario.rates, **befalls}
    if rng.random() < 0.4:
        rates = {kind: rate for kind, rate in rates.items() if kind in HARMLESS_KINDS}
    return dataclasses.replace(
        scenario,
        rates={**rates, "rollout_begun": ROLLOUT_CHANGES_PER_SECOND["rollout_begun"]},
        chaos_seconds=scenario.chaos_seconds + 6.0 / scenario.num_epochs,
        requests_per_second=min(scenario.requests_per_second, 25.0),
    )


def _with_notices(rng: random.Random, scenario: Scenario) -> Scenario:
    """In a few seeds machines are taken away again and again, and little else happens: what runs there has room
    elsewhere, where it can be seen to move."""
    if rng.random() >= NOTICES_SHARE or scenario.has_model_changes or scenario.has_rollouts:
        return scenario
    kept = {kind: rate for kind, rate in scenario.rates.items() if kind in HARMLESS_KINDS}
    roomy = dataclasses.replace(scenario.shards[0], num_blocks=96, max_batch=4, has_scarce_blocks=False, role="")
    return dataclasses.replace(
        scenario,
        rates={
            **kept,
            "spot_notice": 2.0 * FAULTS_PER_SECOND["spot_notice"],
            "scale_in": FAULTS_PER_SECOND["scale_in"],
        },
        shards=(roomy,) * 4,
        chaos_seconds=scenario.chaos_seconds + 1.0 / scenario.num_epochs,
    )


def draw_loaded_shards(rng: random.Random, scenario: Scenario, model: str) -> list[ShardShape]:
    """The shards of a model that is loaded while traffic runs."""
    block_size, max_model_len, max_batch = rng.choice((4, 8)), rng.choice((64, 96)), rng.choice((1, 2, 4))
    like = scenario.shards[0]
    shape = dataclasses.replace(
        like, model=model, block_size=block_size, max_batch=max_batch, max_model_len=max_model_len
    )
    return [shape] * rng.choice((1, 1, 2))


def _make_scarce(rng: random.Random, shards: tuple[ShardShape, ...]) -> tuple[ShardShape, ...]:
    """In some seeds a few sequences hold all blocks. The longest sequence always fits."""
    if rng.random() < 0.6:
        return shards
    num_blocks = rng.choice((24, 32))
    return tuple(dataclasses.replace(shard, num_blocks=num_blocks, has_scarce_blocks=True) for shard in shards)


def _give_roles(rng: random.Random, shards: tuple[ShardShape, ...]) -> tuple[ShardShape, ...]:
    """In some seeds with several shards, some compute prompts and some answer."""
    if len(shards) < 2 or rng.random() >= ROLES_SHARE:
        return shards
    roles = [rng.choice(("prefill", "both")), rng.choice(("decode", "both"))]
    roles += [rng.choice(("prefill", "decode", "decode", "both", "")) for _ in shards[2:]]
    rng.shuffle(roles)
    return tuple(dataclasses.replace(shard, role=role) for shard, role in zip(shards, roles, strict=True))


def _can_hand_over(sampling: object) -> bool:
    return isinstance(sampling, ScriptedSampling) and not sampling.wants_logprobs


def _draw_disaggregation(rng: random.Random) -> DisaggregationSettings:
    """Sized for simulated prompts, which are short."""
    return DisaggregationSettings(
        min_prompt_tokens=rng.choice((4, 12)), leg_timeout_seconds=rng.choice((0.05, 0.3, 30.0))
    )


def _draw_registry_rates(rng: random.Random) -> dict[str, float]:
    if rng.random() > 0.35:
        return {}
    return {
        kind: rate * rng.choice((1.0, 3.0)) for kind, rate in REGISTRY_FAULTS_PER_SECOND.items() if rng.random() < 0.7
    }


def _draw_config(seed: int, rng: random.Random) -> CoreConfig:
    return CoreConfig(
        max_queued_requests=rng.choice((2, 8, 64)),
        max_queue_seconds=rng.choice((0.05, 0.3, 5.0)),
        request_timeout_seconds=rng.choice((0.3, 2.0, 10.0)),
        max_attempts=rng.choice((1, 3, 5)),
        # From a generator of its own, so that another policy does not change the rest of the scenario. The default
        # policy is drawn more often because it has more code than the others.
        policy=random.Random(f"{seed} policy").choice([*sorted(POLICIES), *[DEFAULT_POLICY] * (len(POLICIES) // 2)]),
        answer_mode=rng.choice(("gate", "gate", "async", "off")),
        safety_required=rng.random() < 0.6,
        safety_patience_seconds=random.Random(f"{seed} patience").choice((0.0, 0.02, 0.2, 5.0)),
        max_uncleared_tokens=rng.choice((6, 1000)),
        decision_sample_share=rng.choice((0.0, 0.5, 1.0)),
        health=_draw_health(random.Random(f"{seed} health")),
        overload=_draw_overload(seed, random.Random(f"{seed} overload")),
        brownout=_draw_brownout(random.Random(f"{seed} brownout")),
        fairness=_draw_fairness(random.Random(f"{seed} fairness")),
        classes=_draw_classes(random.Random(f"{seed} classes")),
        disaggregation=_draw_disaggregation(random.Random(f"{seed} disaggregation")),
        handoffs=HandoffAbilities(_can_hand_over),
        # Sized for simulated prompts, which are short.
        prefill_chunks=random.Random(f"{seed} portions").choice(
            (None, PrefillChunkSettings(1e-6, 0.001, 4), PrefillChunkSettings(1e-6, 0.004, 8))
        ),
    )


def _draw_health(rng: random.Random) -> HealthSettings | None:
    """Sized for simulated steps, which are short."""
    if rng.random() < 0.2:
        return None
    return HealthSettings(
        stall_seconds=rng.choice((0.1, 0.25)),
        slow_factor=rng.choice((3.0, 10.0)),
        slow_seconds=rng.choice((0.1, 0.5)),
        max_failures=rng.choice((1, 3)),
        max_suspected_share=rng.choice((0.34, 0.5, 1.0)),
        probe_seconds=rng.choice((0.02, 0.2)),
        max_probe_seconds=1.0,
        num_probes=rng.choice((1, 3)),
    )


def _draw_fairness(rng: random.Random) -> FairnessSettings | None:
    """Sized for simulated answers, which are short."""
    if rng.random() < 0.4:
        return None
    return FairnessSettings(
        preempt_after_seconds=rng.choice((0.002, 0.01, 0.05)),
        reserved_share=rng.choice((0.0, 0.125, 0.5)),
        contention_seconds=rng.choice((0.02, 0.5, 30.0)),
    )


def _draw_classes(rng: random.Random) -> tuple[PriorityClass, ...]:
    """In a quarter of the seeds."""
    if rng.random() < 0.75:
        return ()
    aging_seconds = rng.choice((0.01, 0.05))
    shares = rng.choice(((0.0, 0.0), (0.0, 0.0), (0.5, 0.0), (0.25, 0.25)))
    return (
        PriorityClass("gold", 0, rng.choice((1.0, 3.0)), shares[0], aging_seconds),
        PriorityClass("plain", 1, 1.0, shares[1], aging_seconds),
        PriorityClass("flex", 2, 1.0, 0.0, aging_seconds),
        PriorityClass("idle", 3, 1.0, 0.0, aging_seconds),
    )


def _draw_brownout(rng: random.Random) -> BrownoutSettings | None:
    """In a fifth of the seeds; sized for simulated answers, which are short."""
    if rng.random() > 0.2:
        return None
    cap = BrownoutStepConfig(max_tokens=rng.choice((3, 6, 10)), no_speculation=rng.random() < 0.5)
    steps = [
        BrownoutStepConfig(max_choices=1, applies_to=[rng.choice(("interactive", "batch"))]),
        BrownoutStepConfig(shed=["batch"]),
        BrownoutStepConfig(max_tokens=1, max_queue_seconds=0.05),
    ]
    rng.shuffle(steps)
    return BrownoutSettings(
        enabled=True,
        ttft_slo_seconds=rng.choice((0.01, 0.05, 0.2)),
        target=rng.choice((0.9, 0.95)),
        fast_window_seconds=0.05,
        slow_window_seconds=rng.choice((0.1, 0.5)),
        min_step_seconds=rng.choice((0.05, 0.2)),
        step_up_burn_rate=2.0,
        hold_seconds=rng.choice((0.05, 0.5)),
        min_requests=rng.choice((1, 3)),
        steps=[cap, *steps[: rng.choice((0, 1, 3))]],
    )


def _draw_overload(seed: int, rng: random.Random) -> OverloadSettings:
    """In a third of the seeds without limits new requests wait for the first shard of their model."""
    waits_for_start = random.Random(f"{seed} start patience")
    return OverloadSettings(
        sheds_load_early=rng.random() < 0.5,
        outage_patience_seconds=rng.choice((0.0, 0.05, 0.4, 5.0)),
        ramp_start_requests=rng.choice((NO_RAMP, 1, 2)),
        start_patience_seconds=0.0 if has_limits(seed) else waits_for_start.choice((0.0, 0.0, 0.0, 0.0, 0.05, 0.4)),
    )


def _draw_shards(rng: random.Random) -> tuple[ShardShape, ...]:
    num_shards = rng.choice((1, 2, 2, 3, 4, 6))
    max_batch = rng.choice((1, 2, 4))
    has_two_models = num_shards > 1 and rng.random() < 0.2
    is_mixed = rng.random() < 0.3
    return tuple(
        ShardShape(
            model=MODELS[i % 2] if has_two_models else MODELS[0],
            block_size=rng.choice((4, 8)) if is_mixed else 4,
            num_blocks=rng.choice((24, 96)),
            max_batch=rng.choice((1, 2, 4)) if is_mixed else max_batch,
            max_model_len=rng.choice((64, 96)) if is_mixed else 96,
            max_sequences=rng.choice((3, 1000)) * max_batch,
            variant=("fma", "fma", "tiles")[i % 3] if is_mixed else "fma",
        )
        for i in range(num_shards)
    )
