"""What a simulation is fed with and what it yields: calls in, outcomes out. Times are virtual seconds from 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One request of a trace."""

    call_id: int
    """Unique in the workload; in the order of the trace."""
    num_prompt_tokens: int
    num_output_tokens: int
    """At least 1."""
    block_hashes: Sequence[int]
    """Of the prompt's full blocks, of the workload's block size. Equal hash = reusable KV."""
    session_key: str = ""


class Workload(Protocol):
    """Open loop (arrivals are given) or closed loop (a session's next call follows the end of the one before)."""

    block_size: int
    """Tokens in a block of `Call.block_hashes`."""

    def first_calls(self) -> Iterable[tuple[float, Call]]:
        """(arrival, call), arrivals ascending: what does not depend on any other call's end."""
        ...

    def next_calls(self, ended: Call, now: float) -> Iterable[tuple[float, Call]]:
        """Calls that follow once `ended` has ended at `now`; arrivals are not before `now`. Also called when it
        failed."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How one call went."""

    call: Call
    arrived_at: float
    shard_index: int
    """Where it ended; meaningless when it failed unplaced."""
    num_cached_tokens: int
    ttft_seconds: float
    finished_at: float
    failed: bool = False

    @property
    def tpot_seconds(self) -> float:
        """Mean time per output token behind the first; 0 for answers of one token."""
        num_later_tokens = self.call.num_output_tokens - 1
        if num_later_tokens < 1:
            return 0.0
        return (self.finished_at - self.arrived_at - self.ttft_seconds) / num_later_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class ShardSample:
    """One shard at one time, for plots and imbalance."""

    at: float
    shard_index: int
    num_running: int
    num_waiting: int
    num_queued_prefill_tokens: int
    num_used_blocks: int


@dataclasses.dataclass(frozen=True, slots=True)
class SimulationResult:
    outcomes: Sequence[Outcome]
    """In the order of their ends."""
    samples: Sequence[ShardSample]
    router_cpu_seconds: float
    """CPU time spent inside the router core."""
    num_router_events: int
