"""The pool is a lower bound: no policy has a lower mean TTFT in any small workload."""

from __future__ import annotations

import statistics

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import num_examples
from tests.fakes.sim_calls import ListedWorkload
from tools.simulate.fleet.profile import Profile
from tools.simulate.pool import simulate_pool
from tools.simulate.workload import Call
from tools.simulate.world import FleetOptions, simulate

BLOCK_SIZE = 16
PROFILE = Profile(
    name="small",
    step_floor_seconds=0.02,
    seconds_per_prefill_token=0.0005,
    seconds_per_attention_pair=1e-6,
    seconds_per_context_token=2e-5,
    chunk_tokens=128,
    capacity_tokens=BLOCK_SIZE * 64,
    max_batch=16,
)


@st.composite
def _workloads(draw: st.DrawFn) -> ListedWorkload:
    """Calls with shared prefixes, of which a shard holds a few at a time."""
    num_calls = draw(st.integers(4, 40))
    gaps = st.floats(0, draw(st.sampled_from((0.05, 0.3, 2.0))))
    prefix_blocks = draw(st.integers(0, 20))
    calls: list[tuple[float, Call]] = []
    at = 0.0
    for number in range(num_calls):
        at += draw(gaps)
        prefix = draw(st.integers(0, 3))
        num_tokens = prefix_blocks * BLOCK_SIZE + draw(st.integers(1, 300))
        num_own = num_tokens // BLOCK_SIZE - prefix_blocks
        hashes = [1000 * prefix + block for block in range(prefix_blocks)]
        hashes += [100_000 + 1000 * number + block for block in range(num_own)]
        calls.append((at, Call(number, num_tokens, draw(st.integers(1, 120)), tuple(hashes))))
    return ListedWorkload(calls, BLOCK_SIZE)


@settings(max_examples=num_examples(150), deadline=None)
@given(_workloads(), st.integers(1, 4), st.sampled_from(("ect", "round_robin", "dynamo_w16", "least_requests")))
def test_no_policy_is_better_than_the_pool(workload: ListedWorkload, num_shards: int, policy: str) -> None:
    """Otherwise the distance to it would not be what a better placement could gain."""
    options = FleetOptions(profile=PROFILE, num_shards=num_shards, policy=policy)
    real, pool = simulate(workload, options).outcomes, simulate_pool(workload, options.parts).outcomes
    assert len(real) == len(pool)
    real_mean, pool_mean = (statistics.fmean(one.ttft_seconds for one in outcomes) for outcomes in (real, pool))
    assert pool_mean <= real_mean * (1 + 1e-9)
