"""A modelled shard: continuous batching with chunked prefill over a prefix cache, in virtual time.

One step decodes a token of every running sequence and prefills up to `chunk_tokens` prompt tokens. Steps are not
simulated one by one: decoding sequences are kept as sums, and a run of steps in which nothing can change is one event.

    shard.submit(sequence, now)
    result = shard.end_steps(now)   # at shard.busy_until
    shard.begin_steps(now)          # right after, once all submissions that follow from `result` were made
"""

from __future__ import annotations

import dataclasses
import math

from router.core.events import ShardLoad
from tools.simulate.fleet.engine_order import EngineOrder, FirstComeFirstServed
from tools.simulate.fleet.kv_cache import ModelledKvCache
from tools.simulate.fleet.peer_fetch import PeerLink
from tools.simulate.fleet.profile import Profile
from tools.simulate.fleet.sequence import DecodeBatch, ShardSequence
from tools.simulate.fleet.step_time import DecodeRun, ModelledStepSpeed, decode_run, prefill_step_seconds


@dataclasses.dataclass(slots=True)
class _Counts:
    """Counts of the sequences of one router."""

    num_waiting: int = 0
    num_running: int = 0
    num_queued_prefill_tokens: int = 0


@dataclasses.dataclass(slots=True)
class StepResult:
    """Collects what the steps that have just ended produced."""

    starts: list[ShardSequence] = dataclasses.field(default_factory=list)
    """Sequences that have got their first token."""
    ends: list[ShardSequence] = dataclasses.field(default_factory=list)
    """Sequences that have all their tokens, or were cancelled."""
    stored: list[int] = dataclasses.field(default_factory=list)
    removed: list[int] = dataclasses.field(default_factory=list)
    """Block hashes. The removed blocks made room for those that are being stored."""


class SimShard:
    """`slowness` is how many times longer a step takes than in the profile."""

    def __init__(
        self,
        shard_id: str,
        profile: Profile,
        block_size: int,
        cache: ModelledKvCache,
        *,
        num_routers: int = 1,
        slowness: float = 1.0,
        order: EngineOrder | None = None,
        peer_link: PeerLink | None = None,
    ) -> None:
        self.shard_id = shard_id
        self.cache = cache
        self.busy_until = math.inf
        """When `end_steps` is due. Infinite while the shard is idle."""
        self.num_changes = 0
        """The number of changes that make a new load report worthwhile."""
        self.is_connected = True
        self.is_draining = False
        self._profile = profile
        self._block_size = block_size
        self._slowness = slowness
        self._waiting: EngineOrder = order if order is not None else FirstComeFirstServed(profile.chunk_tokens)
        self._peer_link = peer_link
        self._counts = [_Counts() for _ in range(num_routers)]
        self._sequences: dict[tuple[int, int], ShardSequence] = {}
        """The live sequences, by router and slot."""
        self._speed = ModelledStepSpeed()
        # The current steps: a decode run, one step with prefill chunks, or a wait for a fetch.
        self._began_at = 0.0
        self._num_steps = 0
        """Steps that end at `busy_until`."""
        self._run: DecodeRun | None = None
        self._chunks: list[tuple[ShardSequence, int]] = []
        # Running sequences: in fetch, in prefill, in decode.
        self._fetching: list[tuple[float, ShardSequence]] = []
        """With the time when their blocks arrive, in that order."""
        self._prefilling: list[ShardSequence] = []
        self._decoding = DecodeBatch(num_routers)
        self._num_running = 0
        self._cancelled: list[ShardSequence] = []

    # -- interface ------------------------------------------------------------------------------------------------

    @property
    def num_sequences(self) -> int:
        """The number of waiting and running sequences."""
        return len(self._sequences)

    def can_hold(self, num_prompt_tokens: int, num_output_tokens: int) -> bool:
        """True when a sequence of this length fits at all."""
        return -(-(num_prompt_tokens + num_output_tokens) // self._block_size) <= self.cache.num_blocks

    def submit(self, sequence: ShardSequence, now: float) -> None:
        """Add a sequence that fits. It is considered from the next step on."""
        sequence.submit_time = now
        self._sequences[sequence.router_index, sequence.slot] = sequence
        self._waiting.push(sequence)
        is_first_in_line = self._waiting.newcomers_may_pass or self._waiting.first() is sequence
        counts = self._counts[sequence.router_index]
        counts.num_waiting += 1
        # Like the engines, count for waiting sequences what the router expects to be computed.
        counts.num_queued_prefill_tokens += sequence.num_expected_prefill_tokens
        self.num_changes += 1
        if is_first_in_line:
            self._interrupt(now)

    def cancel(self, router_index: int, slot: int, now: float) -> None:
        """End a sequence when the current step ends. A sequence that has already ended is ignored."""
        sequence = self._sequences.get((router_index, slot))
        if sequence is not None and not sequence.is_cancelled:
            sequence.is_cancelled = True
            self._cancelled.append(sequence)
            self._interrupt(now)

    def load(self, router_index: int, now: float) -> ShardLoad:
        """The load report for a router at this time."""
        num_ended = 0 if self._run is None else min(self._run.count_ended(now - self._began_at), self._num_steps)
        own, decoding = self._counts[router_index], self._decoding
        return ShardLoad(
            num_running=self._num_running,
            num_waiting=len(self._waiting),
            num_queued_prefill_tokens=self.num_queued_prefill_tokens,
            num_decode_context_tokens=decoding.num_context_tokens + num_ended * decoding.num_sequences,
            num_available_blocks=self.cache.num_available,
            prefill_tokens_per_second=self._speed.prefill_tokens_per_second,
            decode_step_seconds=self._speed.decode_step_seconds,
            draining=self.is_draining,
            num_own_running=own.num_running,
            num_own_waiting=own.num_waiting,
            num_own_queued_prefill_tokens=own.num_queued_prefill_tokens,
            num_own_decode_context_tokens=decoding.num_context_tokens_of[router_index]
            + num_ended * decoding.num_sequences_of[router_index],
        )

    def num_output_tokens_of(self, sequence: ShardSequence, now: float) -> int:
        """How many output tokens a live sequence has at this time."""
        num_ended = 0 if self._run is None else min(self._run.count_ended(now - self._began_at), self._num_steps)
        return self._decoding.num_generated(sequence, num_ended)

    def seconds_until_growth(self, share: float) -> float:
        """About how long it takes until decode alone changes the load by this share. Infinite if it does not."""
        if self._run is None:
            return math.inf
        num_steps = share * self._decoding.num_context_tokens / self._decoding.num_sequences
        return num_steps * self._run.first_seconds

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def max_batch(self) -> int:
        return self._profile.max_batch

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_queued_prefill_tokens(self) -> int:
        return sum(counts.num_queued_prefill_tokens for counts in self._counts)

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by live sequences."""
        return self.cache.num_blocks - self.cache.num_available

    # -- steps ----------------------------------------------------------------------------------------------------

    def end_steps(self, now: float) -> StepResult:
        """Finish the current steps."""
        result = StepResult()
        if self._run is not None:
            self._speed.add_decode_run(self._run, self._num_steps)
            for sequence in self._decoding.advance(self._num_steps):
                self._end(sequence, result)
        elif self._chunks:
            num_tokens = sum(count for _, count in self._chunks)
            self._speed.add_prefill_step(num_tokens, now - self._began_at, num_decoding=self._decoding.num_sequences)
            for sequence in self._decoding.advance(1):
                self._end(sequence, result)
            for sequence, count in self._chunks:
                self._compute(sequence, count, result)
        self._run = None
        self._chunks = []
        self._num_steps = 0
        while self._fetching and self._fetching[0][0] <= now:
            self._land(self._fetching.pop(0)[1], result)
        for sequence in self._cancelled:
            if (sequence.router_index, sequence.slot) in self._sequences:
                self._end(sequence, result)
        self._cancelled = []
        result.removed = self.cache.take_evicted()
        self.busy_until = math.inf
        self.num_changes += 1
        return result

    def begin_steps(self, now: float) -> None:
        """Plan the steps until the batch next changes."""
        self._began_at = now
        self.busy_until = math.inf
        self._plan_prefill(now)
        num_decoding, num_context_tokens = self._decoding.num_sequences, self._decoding.num_context_tokens
        if self._chunks:
            chunks = [(sequence.num_computed_tokens, count) for sequence, count in self._chunks]
            seconds = prefill_step_seconds(self._profile, chunks, num_decoding, num_context_tokens)
            self._num_steps = 1
            self.busy_until = now + seconds * self._slowness
        elif num_decoding:
            run = self._run = decode_run(self._profile, num_decoding, num_context_tokens, self._slowness)
            self._num_steps = self._decoding.count_steps_to_end()
            if self._fetching:
                self._num_steps = min(self._num_steps, run.count_until(self._fetching[0][0] - now))
            self.busy_until = now + run.seconds(self._num_steps)
        elif self._fetching:
            self.busy_until = self._fetching[0][0]

    def _interrupt(self, now: float) -> None:
        """End the current run at the next step, which must consider what has just happened."""
        if self._run is not None:
            num_steps = max(1, self._run.count_until(now - self._began_at))
            if num_steps < self._num_steps:
                self._num_steps = num_steps
                self.busy_until = self._began_at + self._run.seconds(num_steps)
        elif not self._chunks:
            self.busy_until = now

    # -- planning -------------------------------------------------------------------------------------------------

    def _plan_prefill(self, now: float) -> None:
        """Distribute the prefill tokens of this step, admitting from the queue as long as some are left."""
        budget = self._profile.chunk_tokens
        chunks = self._chunks
        waiting = self._waiting
        begun = self._prefilling
        waiting.sort_waiting()
        waiting.sort_begun(begun)
        position = 0
        may_admit = True
        while budget:
            sequence = begun[position] if position < len(begun) else None
            first = waiting.first() if may_admit and self._num_running < self._profile.max_batch else None
            if first is not None and (sequence is None or waiting.goes_before(first, sequence)):
                if not self._admit(first, now):
                    may_admit = False
                    continue
                waiting.pop_first()
                if first.num_fetched_blocks:
                    continue
                begun.insert(position, first)
                sequence = first
            if sequence is None:
                return
            position += 1
            count = min(sequence.num_uncomputed_tokens, budget)
            budget -= count
            chunks.append((sequence, count))

    def _admit(self, sequence: ShardSequence, now: float) -> bool:
        """Reserve blocks for the prompt and the output of a sequence. Returns False if too few are available."""
        block_size = self._block_size
        num_blocks = -(-(sequence.num_prompt_tokens + sequence.num_output_tokens) // block_size)
        # The last prompt token is always computed: the first output token comes from it.
        num_reusable = (sequence.num_prompt_tokens - 1) // block_size
        lease = self.cache.admit(sequence.hashes, num_reusable, num_blocks)
        if lease is None:
            return False
        sequence.lease = lease
        sequence.admitted_at = now
        counts = self._counts[sequence.router_index]
        counts.num_waiting -= 1
        counts.num_running += 1
        counts.num_queued_prefill_tokens += sequence.num_prompt_tokens - sequence.num_expected_prefill_tokens
        self._num_running += 1
        self._skip_prefix(sequence, lease.num_cached)
        if self._peer_link is not None:
            fetch = self._peer_link.fetch(sequence, lease.num_cached, now)
            if fetch is not None:
                sequence.num_fetched_blocks, ready_at = fetch
                self._fetching.append((ready_at, sequence))
        return True

    # -- progress -------------------------------------------------------------------------------------------------

    def _compute(self, sequence: ShardSequence, num_tokens: int, result: StepResult) -> None:
        """Record that `num_tokens` more prompt tokens of a sequence are computed."""
        sequence.num_computed_tokens += num_tokens
        counts = self._counts[sequence.router_index]
        counts.num_queued_prefill_tokens -= num_tokens
        self._store(sequence, sequence.num_computed_tokens // self._block_size, result)
        if sequence.num_uncomputed_tokens:
            return
        self._prefilling.remove(sequence)
        result.starts.append(sequence)
        if sequence.num_output_tokens == 1:
            self._end(sequence, result)
        else:
            self._decoding.join(sequence)

    def _land(self, sequence: ShardSequence, result: StepResult) -> None:
        """A fetch is complete. The fetched blocks are stored, and the rest of the prompt is computed."""
        if sequence.lease is None:
            return
        self._store(sequence, sequence.num_fetched_blocks, result)
        self._skip_prefix(sequence, sequence.num_fetched_blocks)
        sequence.num_fetched_blocks = 0
        self._prefilling.append(sequence)

    def _store(self, sequence: ShardSequence, num_blocks: int, result: StepResult) -> None:
        assert sequence.lease is not None
        stored = self.cache.store(sequence.lease, min(num_blocks, len(sequence.hashes)))
        if stored:
            result.stored.extend(stored)

    def _skip_prefix(self, sequence: ShardSequence, num_blocks: int) -> None:
        """Skip the computation of the first `num_blocks` blocks."""
        num_tokens = num_blocks * self._block_size
        self._counts[sequence.router_index].num_queued_prefill_tokens -= num_tokens - sequence.num_computed_tokens
        sequence.num_computed_tokens = sequence.num_cached_tokens = num_tokens

    def _end(self, sequence: ShardSequence, result: StepResult) -> None:
        """Remove a sequence from wherever it is."""
        del self._sequences[sequence.router_index, sequence.slot]
        self._waiting.note_end(sequence)
        result.ends.append(sequence)
        counts = self._counts[sequence.router_index]
        if sequence.lease is None:
            self._waiting.remove(sequence)
            counts.num_waiting -= 1
            counts.num_queued_prefill_tokens -= sequence.num_expected_prefill_tokens
            return
        self.cache.free(sequence.lease)
        sequence.lease = None
        counts.num_running -= 1
        self._num_running -= 1
        counts.num_queued_prefill_tokens -= sequence.num_uncomputed_tokens
        if sequence.end_step is not None:
            self._decoding.leave(sequence)
        elif sequence in self._prefilling:
            self._prefilling.remove(sequence)
