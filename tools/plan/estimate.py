"""The shards that each resource of a fleet needs for a load, from averages. Pure.

With N shards each gets its part of the requests. Prefill takes the share r of a shard's time. What is left decodes b
sequences at once, each step taking floor + b x (seconds per sequence + seconds per context token x mean context), so by
Little's law b = rate x answer x step / (1 - r). A prompt waits while all shards prefill, as in a queue with N servers
(Erlang's formula C, with the correction of Allen and Cunneen for the variation of prompts): the router sends it to a
shard that is idle, if any is. What averages do not have: bursts, prompts that wait for the shard that has their prefix,
and evicted prefixes that are computed again. `--headroom` is for these, and the simulator says how far they reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from tools.failures import CommandError
from tools.plan.demand import PlannedLoad
from tools.simulate.bound import prefill_seconds
from tools.simulate.fleet.profile import Profile
from tools.simulate.statistics import Slo

MAX_SHARDS: Final = 1_000_000
_MANY: Final = 3.0
"""(1 - share) x the root of the number of servers, beyond which waits are rare (Halfin and Whitt)."""
_FULL: Final = 0.95

Resource = Literal["prefill", "decoding", "memory", "batch"]


class ShardUse(msgspec.Struct, frozen=True):
    """How much of one shard the requests of its part of the load use, on average."""

    prefill_share: float
    """Share of the time that goes to prefill. 1 or more: it is not enough."""
    num_sequences: float
    """Sequences that decode at a time; inf if the shard never catches up."""
    tpot_seconds: float
    ttft_seconds: float
    """The 90th percentile."""
    kv_share: float
    """Share of the KV memory that running sequences need for themselves."""


class Estimate(msgspec.Struct, frozen=True):
    """A fleet on paper."""

    num_shards: int
    by_resource: dict[Resource, int]
    """The shards that each resource alone would need."""
    load: ShardUse
    """That of each shard of the whole fleet."""

    @property
    def binding(self) -> Resource:
        """The resource that decides."""
        return max(self.by_resource, key=lambda name: self.by_resource[name])


def load_of_shard(demand: PlannedLoad, profile: Profile, num_shards: int) -> ShardUse:
    """Return what each of so many shards bears in busy spells."""
    rate = demand.requests_per_second * demand.peak_factor / num_shards
    cached = int(demand.prompt_tokens - demand.uncached_tokens)
    own = prefill_seconds(profile, round(demand.prompt_tokens), cached)
    share = rate * own
    context = demand.prompt_tokens + demand.output_tokens / 2
    per_sequence = profile.seconds_per_decode_sequence + profile.seconds_per_context_token * context
    free = 1 - share - rate * demand.output_tokens * per_sequence
    if share >= 1 or free <= 0:
        return ShardUse(share, math.inf, math.inf, math.inf, math.inf)
    num_sequences = rate * demand.output_tokens * profile.step_floor_seconds / free
    step = profile.step_floor_seconds + num_sequences * per_sequence
    wait = _wait_p90(num_shards, share, own * (1 + demand.prefill_variation**2) / 2)
    # A chunk of the prompt shares its step with the sequences that decode.
    num_chunks = max(1.0, demand.uncached_tokens / profile.chunk_tokens)
    computed = (own + num_chunks * num_sequences * per_sequence) * demand.prefill_tail
    kv_tokens = num_sequences * (demand.uncached_tokens + demand.output_tokens / 2)
    return ShardUse(
        share,
        num_sequences,
        step / (1 - share),
        step + computed + wait,
        (kv_tokens + demand.prompt_tokens - demand.uncached_tokens) / profile.capacity_tokens,
    )


def _wait_p90(num_servers: int, share: float, seconds: float) -> float:
    """Return the 90th percentile of the wait for one of so many servers, each busy for the `share` of its time;
    `seconds` is the mean of what is left of a service, as one that arrives finds it."""
    if (1 - share) * math.sqrt(num_servers) > _MANY:
        return 0.0  # hardly any prompt finds all of so many servers busy
    if share > _FULL:
        return math.inf
    offered = num_servers * share
    blocked = 1.0  # Erlang's formula B, by its recursion
    for count in range(1, num_servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    waits = blocked / (1 - share * (1 - blocked))
    return seconds / (num_servers * (1 - share)) * math.log(10 * waits) if waits > 0.1 else 0.0


def estimate(demand: PlannedLoad, profile: Profile, slo: Slo, headroom: float) -> Estimate:
    """Return the smallest fleet that keeps the objective and the `headroom`, a share of each resource. Raises
    CommandError if no number of shards does, since a request alone takes too long."""
    room = 1 - headroom
    enough: dict[Resource, Callable[[ShardUse], bool]] = {
        "prefill": lambda load: load.prefill_share <= room and load.ttft_seconds <= slo.ttft_seconds,
        "decoding": lambda load: load.tpot_seconds <= slo.tpot_seconds * room,
        "memory": lambda load: load.kv_share <= room,
        "batch": lambda load: load.num_sequences <= profile.max_batch * room,
    }
    by_resource: dict[Resource, int] = {}
    for name, is_enough in enough.items():
        by_resource[name] = _smallest(lambda count: load_of_shard(demand, profile, count), is_enough, name)
    if demand.streams is not None:
        by_resource["batch"] = max(by_resource["batch"], math.ceil(demand.streams / (profile.max_batch * room)))
        kept = demand.streams * (demand.uncached_tokens + demand.output_tokens / 2)
        by_resource["memory"] = max(by_resource["memory"], math.ceil(kept / (profile.capacity_tokens * room)))
    num_shards = max(by_resource.values())
    return Estimate(num_shards, by_resource, load_of_shard(demand, profile, num_shards))


def _smallest(load_at: Callable[[int], ShardUse], is_enough: Callable[[ShardUse], bool], resource: Resource) -> int:
    """Raises CommandError."""
    high = 1
    while not is_enough(load_at(high)):
        high *= 2
        if high > MAX_SHARDS:
            raise CommandError(
                f"no fleet of up to {MAX_SHARDS:,} shards meets the objective ({resource}): one request alone takes "
                "too long, or the load is too large"
            )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(load_at(middle)) else (middle, high)
    return high
