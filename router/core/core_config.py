"""The configuration of a router core."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kvloom_common.config import BrownoutConfig, HealthConfig
from router.core.dispatch.fair_shares import FairnessSettings
from router.core.dispatch.overload import OverloadSettings
from router.core.dispatch.prefill_chunks import PrefillChunkSettings
from router.core.dispatch.prefill_legs import DisaggregationSettings
from router.core.placement.policy import Policy
from router.core.priority_classes import PriorityClass


@dataclasses.dataclass(frozen=True, slots=True)
class CoreConfig:
    max_queued_requests: int = 1024
    """Requests that may wait for a shard with room; beyond that a request is refused at once."""
    max_queue_seconds: float = 60.0
    request_timeout_seconds: float = 600.0
    """Time from arrival to the last token, for requests that name no timeout."""
    max_attempts: int = 3
    policy: str = "ect"
    """A name in router.core.placement.POLICIES, or any other with `plugin_policy`."""
    plugin_policy: Callable[[], Policy] | None = None
    """Makes the policy of a plugin. None: `policy` is one of POLICIES."""
    answer_mode: str = "gate"
    """gate: text is withheld until it is screened. async: text is sent at once, and halted on a hit. off: text is not
    screened."""
    safety_required: bool = True
    """True refuses and ends requests rather than serve them without screening."""
    safety_patience_seconds: float = 5.0
    """How long a request that needs a verdict waits for a safety service that has disconnected; 0: not at all."""
    max_held_tokens: int = 65536
    """Tokens of one request that may wait for a verdict."""
    decision_sample_share: float = 0.0
    """Share of the requests (by a hash of their names) whose placements are reported as PlacementDecided."""
    meters_usage: bool = False
    """True gives RequestEnded a `usage`."""
    health: HealthConfig | None = None
    """When a shard is suspected; None: never. Shards must report every step for this."""
    prefill_chunks: PrefillChunkSettings | None = dataclasses.field(default_factory=PrefillChunkSettings)
    """How long prompts are split into chunks, under a policy that lets requests wait; None: they are never split."""
    disaggregation: DisaggregationSettings = dataclasses.field(default_factory=DisaggregationSettings)
    """Says which prompts are computed on shards for prompts, if there are any."""
    overload: OverloadSettings = dataclasses.field(default_factory=OverloadSettings)
    brownout: BrownoutConfig | None = None
    """How answers are degraded under overload; None: never."""
    fairness: FairnessSettings | None = None
    """When a tenant above its share gives way to others; None: never."""
    classes: Sequence[PriorityClass] = ()
    """The declared classes, with the built-in ones; (): none is declared."""
    prompt_token_weight: float = 1.0
    """A prompt token that has to be computed counts as so much service of its tenant."""
    output_token_weight: float = 2.0
