"""The configuration of a router core."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

from kvloom_common.config import FabricConfig, RouterConfig, SafetyConfig
from router.core.dispatch.prefill_chunks import PrefillChunkSettings
from router.core.dispatch.prefill_handoffs import HandoffAbilities
from router.core.placement.policy import Policy
from router.core.priority_classes import PriorityClass
from router.core.rule_settings import (
    NO_RAMP,
    BrownoutSettings,
    DisaggregationSettings,
    FairnessSettings,
    HealthSettings,
    OverloadSettings,
)

_ROUTER: Final = RouterConfig()
_SAFETY: Final = SafetyConfig()
MAX_HELD_TOKENS: Final = 4096
"""The most tokens of one request that are held while its text waits for the safety service."""
NO_OVERLOAD_CONTROL: Final = OverloadSettings(
    sheds_load_early=False, outage_patience_seconds=0.0, ramp_start_requests=NO_RAMP
)


@dataclasses.dataclass(frozen=True, slots=True)
class CoreConfig:
    """The settings of a core. Their defaults are those of the configuration; but what sheds, preempts, suspects or
    samples is off unless it is given."""

    max_queued_requests: int = _ROUTER.max_queued_requests
    """Requests that may wait for a shard with room; beyond that a request is refused at once."""
    max_queue_seconds: float = _ROUTER.max_queue_seconds
    request_timeout_seconds: float = FabricConfig().request_timeout_seconds
    """Time from arrival to the last token, for requests that name no timeout."""
    max_attempts: int = _ROUTER.max_attempts
    policy: str = _ROUTER.placement.policy
    """A name in router.core.placement.POLICIES, or any other with `plugin_policy`."""
    plugin_policy: Callable[[], Policy] | None = None
    """Makes the policy of a plugin. None: `policy` is one of POLICIES."""
    answer_mode: str = _SAFETY.answer_mode
    """gate: text is withheld until it is screened. async: text is sent at once, and halted on a hit. off: text is not
    screened."""
    safety_required: bool = _SAFETY.on_unavailable == "refuse"
    """True refuses and ends requests rather than serve them without screening."""
    safety_patience_seconds: float = _SAFETY.patience_seconds
    """How long a request that needs a verdict waits for a safety service that has disconnected; 0: not at all."""
    max_uncleared_tokens: int = MAX_HELD_TOKENS
    """Tokens of one request that may wait for a verdict."""
    decision_sample_share: float = 0.0
    """Share of the requests (by a hash of their names) whose placements are reported as PlacementDecided."""
    meters_usage: bool = False
    """True gives RequestEnded a `usage`."""
    health: HealthSettings | None = None
    """When a shard is suspected; None: never. Shards must report every step for this."""
    prefill_chunks: PrefillChunkSettings | None = dataclasses.field(default_factory=PrefillChunkSettings)
    """How long prompts are split into chunks, under a policy that lets requests wait; None: they are never split."""
    disaggregation: DisaggregationSettings = dataclasses.field(default_factory=DisaggregationSettings)
    """Says which prompts are computed on shards for prompts, if there are any."""
    handoffs: HandoffAbilities = dataclasses.field(default_factory=HandoffAbilities)
    expected_models: frozenset[str] = frozenset()
    """Models for which requests may wait although none of their shards has been seen."""
    overload: OverloadSettings = dataclasses.field(default_factory=lambda: NO_OVERLOAD_CONTROL)
    """Says what is done under overload; by default nothing is shed, and a queue that is full refuses."""
    brownout: BrownoutSettings | None = None
    """How answers are degraded under overload; None: never."""
    fairness: FairnessSettings | None = None
    """When a tenant above its share gives way to others; None: never."""
    classes: Sequence[PriorityClass] = ()
    """The declared classes, with the built-in ones; (): none is declared."""
