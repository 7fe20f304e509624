"""Changes the frames that shards send."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from router.core.fleet.fleet import Shard
from router.core.frames import Step
from router.core.relay.relay import Relay
from tests.lab.dst.planted_bugs.registry import Patch


def change_steps(patch: Patch, change: Callable[[Shard, Step], None]) -> None:
    """Change every frame of a shard before it reaches the relay; `change` gets a copy of its own."""
    original = Relay.on_step

    def on_step(self: Relay, shard: Shard, step: Step, now: float) -> None:
        step = msgspec.structs.replace(
            step,
            slots=list(step.slots),
            num_tokens=list(step.num_tokens),
            token_ids=list(step.token_ids),
            deltas=list(step.deltas),
            finishes=list(step.finishes),
            starts=list(step.starts),
        )
        change(shard, step)
        original(self, shard, step, now)

    patch.setattr(Relay, "on_step", on_step)
