"""The decision file's header: the fleet that its lines are about."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from router.core.fleet.shard_state import ShardState
from router.decisions.records import FORMAT_VERSION, FleetLine, FleetShard

SPEED_TOLERANCE: Final = 0.2
"""Speeds are measured anew all the time: a change by less than this share is none."""


def fleet_line(shards: Iterable[ShardState], policy: str, router_id: str, at: float) -> FleetLine:
    """`at` in Unix seconds."""
    known = sorted((_fleet_shard(state) for state in shards), key=lambda shard: shard.shard_id)
    return FleetLine(version=FORMAT_VERSION, at=at, router_id=router_id, policy=policy, shards=known)


def is_alike(one: FleetLine, other: FleetLine) -> bool:
    """The same shards, about as fast."""
    return len(one.shards) == len(other.shards) and all(map(_are_alike, one.shards, other.shards))


def _fleet_shard(state: ShardState) -> FleetShard:
    description = state.description
    return FleetShard(
        shard_id=description.shard_id,
        incarnation_id=description.incarnation_id,
        model=description.model,
        block_size=description.block_size,
        num_blocks=description.num_blocks,
        max_batch=description.max_batch,
        max_model_len=description.max_model_len,
        draining=state.is_draining,
        prefill_tokens_per_second=state.prefill_tokens_per_second,
        decode_step_seconds=state.decode_step_seconds,
        prefill_seconds=dict(state.prefill_seconds),
    )


def _are_alike(one: FleetShard, other: FleetShard) -> bool:
    return (
        (one.shard_id, one.incarnation_id, one.draining) == (other.shard_id, other.incarnation_id, other.draining)
        and _is_close(one.prefill_tokens_per_second, other.prefill_tokens_per_second)
        and _is_close(one.decode_step_seconds, other.decode_step_seconds)
        and one.prefill_seconds.keys() == other.prefill_seconds.keys()
        and all(_is_close(value, other.prefill_seconds[name]) for name, value in one.prefill_seconds.items())
    )


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SPEED_TOLERANCE)
