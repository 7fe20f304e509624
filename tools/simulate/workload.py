"""The input and the output of a simulation: calls and outcomes. Times are virtual seconds from 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One request of a trace."""

    call_id: int
    """Unique in the workload, ascending in the order of the trace."""
    num_prompt_tokens: int
    num_output_tokens: int
    """At least 1."""
    block_hashes: Sequence[int]
    """Hashes of the full blocks of the prompt. Blocks with equal hashes have the same KV."""
    session_key: str = ""
    model: str = ""
    """The model that the trace names, or in a fleet of several the one that it is for. It has no effect in a fleet of
    one model."""
    tenant: str = ""
    is_batch: bool = False
    """True when it is in the batch tier."""
    key_id: str = ""
    max_tokens: int | None = None
    """The longest answer that its caller allows; None: what fits the window. It matters in a fleet with limits only."""


class SimulatedWorkload(Protocol):
    """An open loop with given arrivals, or a closed loop, where each call of a session follows the end of the previous
    one."""

    block_size: int
    """The number of tokens in a block of `Call.block_hashes`."""

    def first_calls(self) -> Iterable[tuple[float, Call]]:
        """(arrival, call) of the calls that do not depend on the end of another one, by ascending arrival."""
        ...

    def next_calls(self, ended: Call, now: float) -> Iterable[tuple[float, Call]]:
        """(arrival, call) of the calls that follow after `ended` has ended at `now`, successfully or not. Arrivals are
        not before `now`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one call."""

    call: Call
    arrived_at: float
    shard_index: int
    """The shard where it ended. Meaningless if it failed before it was placed."""
    num_cached_tokens: int
    ttft_seconds: float
    finished_at: float
    failed: bool = False
    predictions: Sequence[tuple[str, float, float | None]] = ()
    """(term, predicted seconds, actual seconds): see router/core/load/prediction.py."""
    error_reason: int = 0
    """An ErrorReason; 0: none."""
    num_output_tokens: int = 0
    """The tokens that it got. A limit may have cut its answer short."""

    @property
    def tpot_seconds(self) -> float:
        """Mean time per output token after the first. 0 for answers of one token."""
        num_later_tokens = self.call.num_output_tokens - 1
        if num_later_tokens < 1:
            return 0.0
        return (self.finished_at - self.arrived_at - self.ttft_seconds) / num_later_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class ShardSample:
    """The state of one shard at one time, for plots and imbalance."""

    at: float
    shard_index: int
    num_running: int
    num_waiting: int
    num_queued_prefill_tokens: int
    num_used_blocks: int


@dataclasses.dataclass(frozen=True, slots=True)
class SimulationResult:
    outcomes: Sequence[Outcome]
    """Ordered by the end of the calls."""
    samples: Sequence[ShardSample]
    router_cpu_seconds: float
    """CPU time spent inside the router core."""
    num_router_events: int
    num_waited_beside_idle: int = 0
    """Requests that waited in a router beside an idle shard for longer than they may (idle_waits.py)."""
    shard_seconds: float = 0.0
    """How long the shards of a fleet with a scaler ran, together."""
    shard_counts: Sequence[tuple[float, int]] = ()
    """(time, shards that run) of such a fleet."""
