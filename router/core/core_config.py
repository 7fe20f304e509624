"""How a router core is set up."""

from __future__ import annotations

import dataclasses

from router.core.dispatch.overload import OverloadConfig
from router.core.dispatch.prefill_chunks import PrefillChunkSettings
from router.core.fleet.shard_health import HealthSettings


@dataclasses.dataclass(frozen=True, slots=True)
class CoreConfig:
    max_queued_requests: int = 1024
    """Waiting for a shard with room; beyond that a request is refused at once."""
    max_queue_seconds: float = 60.0
    request_timeout_seconds: float = 600.0
    """From arrival to the last token, for requests that do not say."""
    max_attempts: int = 3
    policy: str = "ect"
    """A name in router.core.placement.POLICIES."""
    answer_mode: str = "gate"
    """gate: text is held until it is screened. async: sent at once, halted on a hit. off: not screened."""
    safety_required: bool = True
    """Refuse and end requests rather than serve them unscreened."""
    safety_patience_seconds: float = 5.0
    """How long what needs a verdict waits for a safety service that has gone; 0: not at all."""
    max_held_tokens: int = 65536
    """Tokens of one request that may wait for a verdict."""
    decision_sample_share: float = 0.0
    """Share of the requests (by a hash of their names) whose placements are told as PlacementDecided."""
    health: HealthSettings | None = None
    """When a shard is suspected; None: never. Shards must tell of every step then."""
    prefill_chunks: PrefillChunkSettings | None = dataclasses.field(default_factory=PrefillChunkSettings)
    """How long prompts are split, under a policy that holds requests back; None: they never are."""
    overload: OverloadConfig = dataclasses.field(default_factory=OverloadConfig)
