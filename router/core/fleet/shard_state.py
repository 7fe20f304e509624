"""A shard as the core knows it, for observers: the decision log, and tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from router.core.events import ShardDescription
from router.core.fleet.shard_health import HealthState


@dataclasses.dataclass(frozen=True, slots=True)
class ShardState:
    description: ShardDescription
    is_draining: bool
    health: HealthState
    prefill_tokens_per_second: float
    """As the shard reports it; 0: not known yet. The same holds for the next field."""
    decode_step_seconds: float
    prefill_seconds: Mapping[str, float]
    """The learned coefficients, by name (SpeedModel.coefficients)."""
