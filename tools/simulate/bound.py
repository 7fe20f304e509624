"""A bound that no router can beat by much: the fleet as one pool with one queue and one unlimited cache.

There are as many prefill servers as shards. They take calls from one queue in order of arrival, one call at a time, and
have every block of every earlier call. Prefill takes the time of the fleet model without concurrent decoding, and
answers are decoded as if alone on a shard. Reordering the queue could still do better: the bound is for FCFS shards.
Each model has a pool of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Final

from tools.simulate.fleet.fleet import ModelFleet
from tools.simulate.fleet.profile import Profile
from tools.simulate.workload import Call, Outcome, SimulatedWorkload, SimulationResult

_PROGRESS_EVERY: Final = 256


def simulate_bound(
    workload: SimulatedWorkload, models: Sequence[ModelFleet], on_progress: Callable[[int], None] | None = None
) -> SimulationResult:
    """With one model all calls are for it. `on_progress` is called with the number of calls that have ended."""
    arrivals = [(arrival, call.call_id, call) for arrival, call in workload.first_calls()]
    heapq.heapify(arrivals)
    pools: dict[str, tuple[Profile, list[tuple[float, int]]]] = {}
    """The profile of each model, and a heap of (free from, index)."""
    num_servers = 0
    for model in models:
        first, num_servers = num_servers, num_servers + model.num_shards
        pools[model.name] = (model.profile, [(0.0, index) for index in range(first, num_servers)])
    only = next(iter(pools.values())) if len(pools) == 1 else None
    cached: set[int] = set()
    outcomes: list[Outcome] = []
    while arrivals:
        arrived_at, _, call = heapq.heappop(arrivals)
        profile, servers = only or pools[call.model]
        free_at, server = servers[0]
        num_cached_tokens = _look_up(call, cached, workload.block_size)
        first_token_at = max(arrived_at, free_at) + prefill_seconds(profile, call.num_prompt_tokens, num_cached_tokens)
        heapq.heapreplace(servers, (first_token_at, server))
        finished_at = first_token_at + decode_seconds(profile, call.num_prompt_tokens, call.num_output_tokens)
        outcomes.append(Outcome(call, arrived_at, server, num_cached_tokens, first_token_at - arrived_at, finished_at))
        for next_arrival, next_call in workload.next_calls(call, finished_at):
            heapq.heappush(arrivals, (next_arrival, next_call.call_id, next_call))
        if on_progress is not None and len(outcomes) % _PROGRESS_EVERY == 0:
            on_progress(len(outcomes))
    outcomes.sort(key=lambda outcome: outcome.finished_at)
    return SimulationResult(outcomes, (), 0.0, 0)


def prefill_seconds(profile: Profile, num_prompt_tokens: int, num_cached_tokens: int) -> float:
    """The duration of steps of at most one chunk each, without decoding."""
    num_tokens = num_prompt_tokens - num_cached_tokens
    num_full_chunks, rest = divmod(num_tokens, profile.chunk_tokens)
    chunk_seconds = max(profile.step_floor_seconds, profile.seconds_per_prefill_token * profile.chunk_tokens)
    rest_seconds = max(profile.step_floor_seconds, profile.seconds_per_prefill_token * rest) if rest else 0.0
    num_pairs = num_tokens * (num_cached_tokens + num_tokens / 2)
    return num_full_chunks * chunk_seconds + rest_seconds + profile.seconds_per_attention_pair * num_pairs


def decode_seconds(profile: Profile, num_prompt_tokens: int, num_output_tokens: int) -> float:
    """The duration of all tokens after the first, alone on a shard."""
    num_steps = num_output_tokens - 1
    context_tokens = num_steps * (num_prompt_tokens + num_output_tokens / 2)
    step_seconds = profile.step_floor_seconds + profile.seconds_per_decode_sequence
    return num_steps * step_seconds + profile.seconds_per_context_token * context_tokens


def _look_up(call: Call, cached: set[int], block_size: int) -> int:
    """Returns the number of cached prompt tokens, and adds the blocks of the call to the cache. At least one token is
    always computed."""
    num_blocks = 0
    for block_hash in call.block_hashes:
        if block_hash not in cached:
            break
        num_blocks += 1
    cached.update(call.block_hashes)
    return min(num_blocks * block_size, call.num_prompt_tokens - 1)
