"""Experiments in virtual time: the real router core, modelled shards, and requests that no others resemble, so that the
figures are the same on every machine."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvloom_common.config import KvloomConfig
from router.core.core import CoreConfig
from router.core_settings import core_config
from tools.simulate.fleet.fleet import FleetOptions
from tools.simulate.fleet.profile import PROFILES
from tools.simulate.workload import Call
from tools.simulate.world import simulate

BLOCK_SIZE: Final = 64
SPREAD: Final = 0.8
"""The standard deviation of the logarithms of prompt and answer lengths."""
SATURATING_RATE: Final = 200.0
"""Requests per second and shard in the run that measures a fleet's capacity."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """How long prompts and answers are, in tokens."""

    draw_name: str
    """Part of the seed of the draws."""
    mean_prompt_tokens: float
    mean_output_tokens: float
    max_prompt_tokens: int
    max_output_tokens: int
    batch_share: float | None = None
    """The share of requests in the batch tier. None: the experiment has no tiers."""

    def draw(self, call_id: int, rng: random.Random) -> Call:
        num_prompt_tokens = _length(rng, self.mean_prompt_tokens, self.max_prompt_tokens)
        num_output_tokens = _length(rng, self.mean_output_tokens, self.max_output_tokens)
        hashes = [call_id * 1024 + i for i in range(num_prompt_tokens // BLOCK_SIZE)]
        is_batch = self.batch_share is not None and rng.random() < self.batch_share
        return Call(call_id, num_prompt_tokens, num_output_tokens, hashes, is_batch=is_batch)


class RandomCalls:
    """Independent requests at random times, at a rate that changes from phase to phase."""

    block_size = BLOCK_SIZE

    def __init__(
        self, phases: Sequence[tuple[float, float, float]], lengths: Lengths, seed: int, max_calls: int = 10**9
    ) -> None:
        """`phases` has the begin, the end (in seconds) and the requests per second of each."""
        self._phases = phases
        self._lengths = lengths
        self._seed = seed
        self._max_calls = max_calls

    def first_calls(self) -> Iterable[tuple[float, Call]]:
        arrivals, calls = (
            random.Random(f"{self._seed} arrivals"),
            random.Random(f"{self._seed} {self._lengths.draw_name}"),
        )
        call_id = 0
        for begin, end, rate in self._phases:
            at = begin + arrivals.expovariate(rate)
            while at < end and call_id < self._max_calls:
                yield at, self._lengths.draw(call_id, calls)
                call_id += 1
                at += arrivals.expovariate(rate)

    def next_calls(self, ended: Call, now: float) -> Iterable[tuple[float, Call]]:  # noqa: ARG002  (open loop)
        return ()


def fleet_capacity(
    num_shards: int, profile: str, lengths: Lengths, seed: int, num_calls_per_shard: int = 2400
) -> float:
    """The requests per second that a fleet completes when requests never run out."""
    workload = RandomCalls(
        [(0.0, math.inf, SATURATING_RATE * num_shards)], lengths, seed, num_calls_per_shard * num_shards
    )
    options = FleetOptions(profile=PROFILES[profile], num_shards=num_shards, policy="least_requests", seed=seed)
    ends = sorted(outcome.finished_at for outcome in simulate(workload, options).outcomes)
    # The first answers are left out because batches are still filling up, the last because batches run empty.
    first, last = ends[len(ends) // 4], ends[3 * len(ends) // 4]
    return (len(ends) // 2) / (last - first)


def router_core(**changes: Any) -> CoreConfig:
    """The configuration of a router with default settings but for `changes`, and without a safety service."""
    return dataclasses.replace(
        core_config(KvloomConfig()),
        answer_mode="off",
        safety_required=False,
        decision_sample_share=0.0,
        health=None,
        **changes,
    )


def percentile(values: Iterable[float], share: float) -> float | None:
    """One of the values, in milliseconds' precision. None if there are none."""
    ordered = sorted(values)
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3) if ordered else None


def share_of(num_counted: int, num_all: int) -> float | None:
    return round(num_counted / num_all, 4) if num_all else None


def _length(rng: random.Random, mean: float, most: int) -> int:
    return max(1, min(most, round(rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD))))
