"""The router core's settings, from the configuration."""

from __future__ import annotations

from typing import Final

from kvloom.config import KvloomConfig
from router.core.core import CoreConfig
from router.core.dispatch.fair_shares import FairnessSettings
from router.core.dispatch.overload import OverloadSettings
from router.core.dispatch.prefill_chunks import PrefillChunkSettings
from router.placement_plugins import guarded_policy

MAX_HELD_TOKENS: Final = 4096
"""The most tokens of one sequence that are held while its text waits for the safety service."""


def core_config(config: KvloomConfig) -> CoreConfig:
    """Raises PluginError for a placement policy that does not exist or cannot be loaded."""
    router = config.router
    return CoreConfig(
        max_queued_requests=router.max_queued_requests,
        max_queue_seconds=router.max_queue_seconds,
        request_timeout_seconds=router.request_timeout_seconds,
        max_attempts=router.max_attempts,
        policy=router.placement.policy,
        plugin_policy=guarded_policy(router.placement.policy),
        prefill_chunks=PrefillChunkSettings() if router.placement.prefill_chunks else None,
        answer_mode=config.safety.answer_mode,
        safety_required=config.safety.on_unavailable == "refuse",
        safety_patience_seconds=config.safety.patience_seconds,
        max_held_tokens=MAX_HELD_TOKENS,
        decision_sample_share=router.decision_log.sample_share,
        meters_usage=config.control.enabled,
        health=router.health if router.health.enabled else None,
        overload=OverloadSettings(
            sheds_early=router.overload.sheds_early,
            outage_patience_seconds=router.overload.outage_patience_seconds,
            ramp_start_requests=router.overload.ramp_start_requests,
        ),
        brownout=router.brownout if router.brownout.enabled else None,
        fairness=FairnessSettings(
            preempt_after_seconds=router.fairness.preempt_after_seconds,
            reserved_share=router.fairness.reserved_share,
            contention_seconds=router.fairness.contention_seconds,
        )
        if router.fairness.enabled
        else None,
    )
