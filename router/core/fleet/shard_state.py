"""A shard as the core knows it, for those who look on: the decision log, tools."""

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
    """As the shard reports it; 0: not known yet. So is the next one."""
    decode_step_seconds: float
    prefill_seconds: Mapping[str, float]
    """The learned coefficients, by name (SpeedModel.coefficients)."""
