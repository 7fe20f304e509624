"""A bound of the mean TTFT that has KV memory and decoding: one pool instead of shards.

What separates a fleet from it is that memory, decoding and prefill are divided between shards. The pool has

- one cache with the blocks of all shards and of one more, so that nothing is lost by dividing them, where every
  block is stored once, and is there as soon as a call is admitted that computes it; a call is admitted when its blocks
  are free;
- as many prefill servers as shards, which always run the calls with the shortest remaining prefill;
- decoding that is spread evenly at every moment, over all shards or over those without prefill, whichever is faster;
- prefill whose steps are longer by the context that decodes beside all of them, on the shard with the least of it.

Each of these is in favour of the pool, and the shortest prefill first has the least waiting. That no policy has a lower
mean TTFT is tested in small random workloads, not proved. Goodput is not bounded: under overload a fleet that serves
some calls well and others badly has more of it than the pool, which serves all of them alike. All shards are taken to
be as fast as the profile.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final

from tools.simulate.bound import prefill_seconds
from tools.simulate.fleet.fleet import ModelFleet
from tools.simulate.fleet.kv_cache import Lease, ModelledKvCache
from tools.simulate.workload import Call, Outcome, SimulatedWorkload, SimulationResult

_PROGRESS_EVERY: Final = 256


def simulate_pool(
    workload: SimulatedWorkload, models: Sequence[ModelFleet], on_progress: Callable[[int], None] | None = None
) -> SimulationResult:
    """With one model all calls are for it. `on_progress` is called with the number of calls that have ended."""
    pools: dict[str, _Pool] = {}
    num_shards = 0
    for model in models:
        pools[model.name] = _Pool(model, workload.block_size, num_shards)
        num_shards += model.num_shards
    only = next(iter(pools.values())) if len(pools) == 1 else None
    arrivals = [(arrival, call.call_id, call) for arrival, call in workload.first_calls()]
    heapq.heapify(arrivals)
    outcomes: list[Outcome] = []
    while True:
        pool = min(pools.values(), key=lambda one: one.next_at)
        if arrivals and arrivals[0][0] <= pool.next_at:
            now, _, call = heapq.heappop(arrivals)
            ended = (only or pools[call.model]).arrive(call, now)
        elif pool.next_at < math.inf:
            now = pool.next_at
            ended = pool.advance(now)
        else:
            break
        for outcome in ended:
            outcomes.append(outcome)
            for next_arrival, next_call in workload.next_calls(outcome.call, now):
                heapq.heappush(arrivals, (max(next_arrival, now), next_call.call_id, next_call))
            if on_progress is not None and len(outcomes) % _PROGRESS_EVERY == 0:
                on_progress(len(outcomes))
    return SimulationResult(outcomes, (), 0.0, 0)


class _Job:
    """A call in the pool."""

    __slots__ = (
        "arrived_at",
        "call",
        "due_at",
        "lease",
        "rest_seconds",
        "rest_tokens",
        "started_at",
        "step_seconds",
        "token_seconds",
    )

    def __init__(self, call: Call, arrived_at: float, token_seconds: float) -> None:
        self.call = call
        self.arrived_at = arrived_at
        self.token_seconds = token_seconds
        """By how much it makes each decode step longer, on average."""
        self.lease: Lease | None = None
        self.rest_seconds = 0.0
        """Work of prefill that is left: without the floor of its steps, which calls share that are in one step."""
        self.due_at = 0.0
        """When its first token would come if no other prefill were in its way: not before its last step ends."""
        self.rest_tokens = 0
        """Prompt tokens that were not cached."""
        self.step_seconds = 0.0
        """The duration of a step of its prefill."""
        self.started_at = 0.0
        """When it had its first token."""


class _Pool:
    def __init__(self, model: ModelFleet, block_size: int, first_shard: int) -> None:
        self.next_at = math.inf
        """When something changes without an arrival."""
        self._profile = model.profile
        self._num_shards = model.num_shards
        self._next_shard = itertools.cycle(range(first_shard, first_shard + model.num_shards)).__next__
        """Calls count as those of all shards in turn."""
        self._block_size = block_size
        self._blocks_each = model.capacity_blocks or model.profile.capacity_tokens // block_size
        self._cache = ModelledKvCache(self._blocks_each * (model.num_shards + 1))
        self._waiting: list[_Job] = []
        """Without blocks, the shortest prompt first."""
        self._prefilling: list[_Job] = []
        """The least remaining prefill first; as many run as there are shards."""
        self._ending: list[tuple[float, int, _Job]] = []
        """A heap by `due_at` of those whose work is done."""
        self._decoding: list[tuple[float, int, _Job]] = []
        """A heap by the value of `_num_tokens` at which the last token comes."""
        self._number = itertools.count().__next__
        self._num_tokens = 0.0
        """Tokens that a sequence would have had which has decoded from the beginning."""
        self._token_seconds = 0.0
        """The sum over the sequences that decode."""
        self._rate = 0.0
        """Tokens per second of each of them."""
        self._now = 0.0

    def arrive(self, call: Call, now: float) -> list[Outcome]:
        """Returns the calls that have ended meanwhile."""
        ended = self._move(now)
        num_tokens, profile = call.num_prompt_tokens + call.num_output_tokens, self._profile
        if -(-num_tokens // self._block_size) > self._blocks_each:
            ended.append(Outcome(call, now, self._next_shard(), 0, 0.0, now, failed=True))
        else:
            context = call.num_prompt_tokens + call.num_output_tokens / 2
            token_seconds = profile.seconds_per_context_token * context + profile.seconds_per_decode_sequence
            self._waiting.append(_Job(call, now, token_seconds))
            self._waiting.sort(key=lambda job: job.call.num_prompt_tokens)
            self._admit()
        self._plan()
        return ended

    def advance(self, now: float) -> list[Outcome]:
        """Returns the calls that have ended."""
        ended = self._move(now)
        self._plan()
        return ended

    def _move(self, now: float) -> list[Outcome]:
        """Let time pass; nothing changes before `now`."""
        elapsed, self._now = now - self._now, now
        self._num_tokens += self._rate * elapsed
        for job in self._prefilling[: self._num_shards]:
            job.rest_seconds -= elapsed
        ended: list[Outcome] = []
        while self._prefilling and self._prefilling[0].rest_seconds <= 1e-12:
            job = self._prefilling.pop(0)
            heapq.heappush(self._ending, (job.due_at, self._number(), job))
        while self._ending and self._ending[0][0] <= now:
            self._start(heapq.heappop(self._ending)[2], ended)
        while self._decoding and self._decoding[0][0] <= self._num_tokens * (1 + 1e-12):
            job = heapq.heappop(self._decoding)[2]
            self._token_seconds -= job.token_seconds
            self._end(job, ended)
        if ended and self._waiting:
            self._admit()
        return ended

    def _start(self, job: _Job, ended: list[Outcome]) -> None:
        job.started_at = self._now
        if job.call.num_output_tokens == 1:
            self._end(job, ended)
            return
        heapq.heappush(self._decoding, (self._num_tokens + job.call.num_output_tokens - 1, self._number(), job))
        self._token_seconds += job.token_seconds

    def _end(self, job: _Job, ended: list[Outcome]) -> None:
        lease = job.lease
        assert lease is not None
        self._cache.free(lease)
        num_cached = job.call.num_prompt_tokens - job.rest_tokens
        ttft_seconds = job.started_at - job.arrived_at
        ended.append(Outcome(job.call, job.arrived_at, self._next_shard(), num_cached, ttft_seconds, self._now))

    def _admit(self) -> None:
        """Give blocks to those that find enough."""
        kept: list[_Job] = []
        for job in self._waiting:
            call = job.call
            num_blocks = -(-(call.num_prompt_tokens + call.num_output_tokens) // self._block_size)
            lease = self._cache.admit(call.block_hashes, (call.num_prompt_tokens - 1) // self._block_size, num_blocks)
            if lease is None:
                kept.append(job)
                continue
            job.lease = lease
            num_cached = lease.num_cached * self._block_size
            self._cache.store(lease, len(call.block_hashes))
            job.rest_tokens = call.num_prompt_tokens - num_cached
            num_steps = -(-job.rest_tokens // self._profile.chunk_tokens)
            seconds = prefill_seconds(self._profile, call.num_prompt_tokens, num_cached)
            job.step_seconds = seconds / num_steps
            job.due_at = self._now + seconds + num_steps * self._unavoidable_seconds(num_steps)
            num_pairs = job.rest_tokens * (num_cached + job.rest_tokens / 2)
            job.rest_seconds = (
                self._profile.seconds_per_prefill_token * job.rest_tokens
                + self._profile.seconds_per_attention_pair * num_pairs
            )
            self._prefilling.append(job)
        self._waiting = kept
        self._cache.take_evicted()

    def _unavoidable_seconds(self, num_steps: int) -> float:
        """By how much each of so many steps of prefill is longer for what decodes beside all of them, on the shard that
        has the fewest of these sequences, and the shortest ones."""
        num_most = len(self._decoding) // self._num_shards
        if not num_most:
            return 0.0
        ends_after = self._num_tokens + num_steps
        beside = sorted(job.token_seconds for at, _, job in self._decoding if at >= ends_after)
        return sum(beside[: len(beside) // self._num_shards])

    def _plan(self) -> None:
        self._prefilling.sort(key=lambda job: job.rest_seconds)
        running = self._prefilling[: self._num_shards]
        self._rate = self._tokens_per_second(running) if self._decoding else 0.0
        self.next_at = self._now + running[0].rest_seconds if running else math.inf
        if self._ending:
            self.next_at = min(self.next_at, self._ending[0][0])
        if self._decoding:
            at = self._now + max(0.0, self._decoding[0][0] - self._num_tokens) / self._rate
            self.next_at = min(self.next_at, at)

    def _tokens_per_second(self, prefilling: Sequence[_Job]) -> float:
        floor_seconds, num_free = self._profile.step_floor_seconds, self._num_shards - len(prefilling)
        each = self._token_seconds / self._num_shards
        on_all = num_free / (floor_seconds + each) + sum(1 / (job.step_seconds + each) for job in prefilling)
        on_free = 1 / (floor_seconds + self._token_seconds / num_free) if num_free else 0.0
        return max(on_all / self._num_shards, on_free)
