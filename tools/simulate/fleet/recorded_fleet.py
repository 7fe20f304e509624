"""Converts the fleet in a decision file to the fleet model: how many shards, how large, how fast.

The file has what the router learned about prefill (router/core/load/speed_model.py) and the duration of a decode step.
The model needs a roofline of one step:

    step_floor_seconds          decode_step_seconds, as measured under the recorded load
    seconds_per_prefill_token   c1 + c0 / tokens of a usual request, so that a single one takes what was learned
    seconds_per_attention_pair  c2

A decode step takes the same time with few sequences and with many, because the file does not have what each one adds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from router.core.load.speed_model import DEFAULT_PREFILL_TOKENS_PER_SECOND
from router.decisions.journal import SPEED_TOLERANCE
from router.decisions.records import FleetLine, FleetShard
from tools.simulate.fleet.profile import Profile

PROFILE_NAME: Final = "recorded"
MIN_CHUNK_TOKENS: Final = 512
"""The file does not have the size of prefill chunks. This is the default of kvloom."""
_MIN_SECONDS: Final = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedFleet:
    shard_ids: tuple[str, ...]
    capacity_blocks: int
    """The mean number of blocks per shard."""
    max_model_len: int
    """The smallest window of a shard."""
    profile: Profile
    speed_factors: tuple[float, ...]
    """The factor of each shard relative to the profile. () if none differs much from the others."""

    @property
    def num_shards(self) -> int:
        return len(self.shard_ids)

    def factors_of(self, num_shards: int) -> tuple[float, ...]:
        """The factors of another number of shards: if there are more than were recorded, they repeat."""
        factors = self.speed_factors
        return tuple(factors[index % len(factors)] for index in range(num_shards)) if factors else ()


@dataclasses.dataclass(frozen=True, slots=True)
class UsualRequest:
    """A typical request, by which the speeds of shards are compared. It replaces speeds that no shard has reported."""

    num_computed_tokens: float
    """At least 1."""
    num_cached_tokens: float
    tpot_seconds: float | None

    def prefill_seconds(self, coefficients: Mapping[str, float]) -> float:
        num_pairs = self.num_computed_tokens * (self.num_cached_tokens + self.num_computed_tokens / 2)
        return (
            coefficients["request"]
            + coefficients["token"] * self.num_computed_tokens
            + coefficients["attention_pair"] * num_pairs
        )


def serving_shards(line: FleetLine, model: str, block_size: int) -> list[FleetShard]:
    """The shards of a model that accepted new requests, or all of them if all were draining."""
    shards = [shard for shard in line.shards if (shard.model, shard.block_size) == (model, block_size)]
    return [shard for shard in shards if not shard.draining] or shards


def recorded_fleet(shards: Sequence[FleetShard], usual: UsualRequest) -> RecordedFleet:
    """There must be at least one shard. All must have the same block size."""
    coefficients = [_prefill_coefficients(shard) for shard in shards]
    mean = {name: statistics.fmean(one[name] for one in coefficients) for name in coefficients[0]}
    floor = _step_floor_seconds(shards, usual, mean)
    seconds_per_token = max(_MIN_SECONDS, mean["token"] + mean["request"] / usual.num_computed_tokens)
    capacity_blocks = max(1, round(statistics.fmean(shard.num_blocks for shard in shards)))
    profile = Profile(
        name=PROFILE_NAME,
        step_floor_seconds=floor,
        seconds_per_prefill_token=seconds_per_token,
        seconds_per_attention_pair=mean["attention_pair"],
        seconds_per_context_token=0.0,
        seconds_per_decode_sequence=0.0,
        # With shorter chunks steps would be bound by the floor, and prefill slower than was learned.
        chunk_tokens=max(MIN_CHUNK_TOKENS, math.ceil(floor / seconds_per_token)),
        capacity_tokens=capacity_blocks * shards[0].block_size,
        max_batch=max(1, round(statistics.fmean(shard.max_batch for shard in shards))),
    )
    factors = _speed_factors([usual.prefill_seconds(one) for one in coefficients])
    max_model_len = min(shard.max_model_len for shard in shards)
    return RecordedFleet(tuple(shard.shard_id for shard in shards), capacity_blocks, max_model_len, profile, factors)


def _prefill_coefficients(shard: FleetShard) -> dict[str, float]:
    seconds_per_token = 1.0 / (shard.prefill_tokens_per_second or DEFAULT_PREFILL_TOKENS_PER_SECOND)
    unlearned = {"request": 0.0, "token": seconds_per_token, "attention_pair": 0.0}
    return {name: shard.prefill_seconds.get(name, seconds) for name, seconds in unlearned.items()}


def _step_floor_seconds(shards: Sequence[FleetShard], usual: UsualRequest, mean: Mapping[str, float]) -> float:
    known = [shard.decode_step_seconds for shard in shards if shard.decode_step_seconds > 0]
    return max(_MIN_SECONDS, statistics.fmean(known) if known else usual.tpot_seconds or mean["request"])


def _speed_factors(seconds: Sequence[float]) -> tuple[float, ...]:
    """Factors from the prefill time of a usual request on each shard. Learned speeds scatter, so that small differences
    are ignored."""
    mean = statistics.fmean(seconds)
    if mean <= 0 or max(seconds) <= min(seconds) * (1 + SPEED_TOLERANCE):
        return ()
    return tuple(max(one, _MIN_SECONDS) / mean for one in seconds)
