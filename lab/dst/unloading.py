"""How a supervisor lets the answers of a model end, as `tools/supervisor/models/changes.py` does, whose rule says when
they have."""

from __future__ import annotations

from collections.abc import Sequence

from lab.dst.nodes.shard import SimulatedShard
from tools.supervisor.models.idle_watch import ShardWork


def withdraw(shards: Sequence[SimulatedShard]) -> list[ShardWork | None]:
    """Tell the shards of a model that it is to end, and return what they have to do. They are told again with each
    poll: one may have restarted. One that hangs does not answer, and one that is down comes back."""
    return [_withdraw(shard) if shard.is_up and not shard.is_hung else None for shard in shards]


def _withdraw(shard: SimulatedShard) -> ShardWork:
    shard.set_withdrawn(True)
    return ShardWork(len(shard.engine.sequences), shard.num_submitted)
