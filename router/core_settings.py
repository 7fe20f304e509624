"""The router core's settings, from the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvloom.v1.generation_pb2 import SamplingParams
from kvloom_common.config import KvloomConfig, PriorityClassConfig, with_constants
from kvloom_common.models.configured import configured_models
from router.core.core import CoreConfig
from router.core.dispatch.prefill_chunks import PrefillChunkSettings
from router.core.dispatch.prefill_handoffs import HandoffAbilities
from router.core.priority_classes import CLASS_OF_TIER, PriorityClass
from router.core.rule_settings import (
    BrownoutSettings,
    DisaggregationSettings,
    FairnessSettings,
    HealthSettings,
    OverloadSettings,
)
from router.placement_plugins import guarded_policy


def declared_classes(configs: Sequence[PriorityClassConfig]) -> Mapping[str, PriorityClass]:
    """All classes by name, if any is declared. Those that are built in then age like others, so that none starves."""
    if not configs:
        return {}
    aging_seconds = msgspec.structs.fields(PriorityClassConfig)
    default = next(field.default for field in aging_seconds if field.name == "aging_seconds")
    built_in = (msgspec.structs.replace(one, aging_seconds=default) for one in CLASS_OF_TIER.values())
    declared = (
        PriorityClass(one.name, one.rank, one.weight, one.reserved_share, one.aging_seconds, one.max_queue_seconds)
        for one in configs
    )
    return {one.name: one for one in (*built_in, *declared)}


def _can_hand_over(sampling: object) -> bool:
    """The state of a guide stays in the engine that has begun."""
    return not (isinstance(sampling, SamplingParams) and sampling.HasField("guide"))


def _wants_logprobs(sampling: object) -> bool:
    return isinstance(sampling, SamplingParams) and sampling.HasField("logprobs")


def core_config(config: KvloomConfig) -> CoreConfig:
    """Raises PluginError for a placement policy that does not exist or cannot be loaded."""
    router = config.router
    waits_for_start = router.overload.start_patience_seconds > 0
    return CoreConfig(
        expected_models=frozenset(model.name for model in configured_models(config) if waits_for_start),
        max_queued_requests=router.max_queued_requests,
        max_queue_seconds=router.max_queue_seconds,
        request_timeout_seconds=config.fabric.request_timeout_seconds,
        max_attempts=router.max_attempts,
        policy=router.placement.policy,
        plugin_policy=guarded_policy(router.placement.policy),
        prefill_chunks=PrefillChunkSettings() if router.placement.prefill_chunks else None,
        disaggregation=with_constants(router.disaggregation, DisaggregationSettings),
        handoffs=HandoffAbilities(can_hand_over=_can_hand_over, wants_logprobs=_wants_logprobs),
        answer_mode=config.safety.answer_mode,
        safety_required=config.safety.on_unavailable == "refuse",
        safety_patience_seconds=config.safety.patience_seconds,
        decision_sample_share=router.decision_log.sample_share,
        meters_usage=config.control.enabled,
        health=with_constants(router.health, HealthSettings) if router.health.enabled else None,
        overload=with_constants(router.overload, OverloadSettings),
        brownout=with_constants(router.brownout, BrownoutSettings) if router.brownout.enabled else None,
        fairness=with_constants(router.fairness, FairnessSettings) if router.fairness.enabled else None,
        classes=tuple(declared_classes(router.classes).values()),
    )
