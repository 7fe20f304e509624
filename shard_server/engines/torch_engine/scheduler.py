"""What the next step computes: admission in order, chunked prefill, prefix reuse, preemption by recompute.

Why it cannot livelock: `running` is in order of admission and only its newest member is ever preempted, so the oldest
one runs to its end; and since every sequence fits alone (the engine refuses longer ones), the oldest always finds its
blocks. That holds for any order of admission. Nor does anybody starve: what was preempted is admitted before all that
has not run yet, and the first in the queue is never passed over for want of blocks; among the others the order bounds
for how long one can be overtaken (queue_order.py).
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Final, Literal

from shard_server.engines.base import LoadShare
from shard_server.engines.queue_order import admission_rank, count_cached_blocks
from shard_server.engines.torch_engine.block_pool import BlockPool
from shard_server.engines.torch_engine.sequence import Sequence

MAX_PREFILL_SECONDS_PER_STEP: Final = 1.0
"""What decoding sequences wait for at most, and short against the silence for which routers take a shard for stalled
(`router.health.stall_seconds`): a CPU without bf16 arithmetic takes 25 ms a token."""
MIN_PREFILL_TOKENS_PER_STEP: Final = 32
"""However slow it is: fewer take hardly less time."""

Chunk = tuple[Sequence, int]
"""A sequence and how many of its uncomputed tokens a step computes."""


class Scheduler:
    """Decides; computes nothing. `max_prefill_tokens_per_step` bounds how long a step can stall the decoding ones; so
    does MAX_PREFILL_SECONDS_PER_STEP on a slow machine."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch: int,
        max_prefill_tokens_per_step: int,
        queue_order: Literal["fcfs", "shortest_prefill"] = "fcfs",
    ) -> None:
        self.pool = pool
        self.max_batch = max_batch
        self.max_prefill_tokens_per_step = max_prefill_tokens_per_step
        self.queue_order = queue_order
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def load_shares(self) -> defaultdict[int, LoadShare]:
        """What is to be done, by origin; of what waits, what the router expects to be computed."""
        shares: defaultdict[int, LoadShare] = defaultdict(LoadShare)
        for sequence in self.waiting:
            share = shares[sequence.request.origin]
            share.num_waiting += 1
            share.num_queued_prefill_tokens += sequence.request.num_expected_prefill_tokens
        for sequence in self.running:
            share = shares[sequence.request.origin]
            share.num_running += 1
            num_tokens = len(sequence.token_ids)
            num_uncomputed = num_tokens - sequence.num_computed_tokens
            if num_uncomputed > 1:
                share.num_queued_prefill_tokens += num_uncomputed
            else:
                share.num_decode_context_tokens += num_tokens
        return shares

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self, prefill_tokens_per_second: float = 0.0) -> list[Chunk]:
        """One step's work: every decoding sequence, then as much prefill as the budget allows. Empty only without
        work. The speed bounds the budget, and ranks the waiting ones; without one (0) they stay in the order of
        arrival."""
        budget = self.prefill_budget(prefill_tokens_per_second)
        batch: list[Chunk] = []
        index = 0
        while index < len(self.running):  # preemption takes members away behind `index`
            sequence = self.running[index]
            index += 1
            num_tokens = sequence.num_uncomputed_tokens
            if num_tokens > 1:
                num_tokens = min(num_tokens, budget)
                budget -= num_tokens
                if not num_tokens:
                    continue
            elif not self._append_block(sequence):
                break
            batch.append((sequence, num_tokens))
        if self.queue_order == "shortest_prefill" and prefill_tokens_per_second:
            self._sort_waiting(budget, prefill_tokens_per_second)
        self._admit(batch, budget)
        assert batch or not self.has_work, "there is work, and none of it can be scheduled"
        return batch

    def prefill_budget(self, prefill_tokens_per_second: float) -> int:
        """Tokens of prefill in a step."""
        if not prefill_tokens_per_second:
            return self.max_prefill_tokens_per_step
        num_in_time = int(prefill_tokens_per_second * MAX_PREFILL_SECONDS_PER_STEP)
        return min(max(num_in_time, MIN_PREFILL_TOKENS_PER_STEP), self.max_prefill_tokens_per_step)

    def mark_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of the next `num_tokens` tokens lies in the sequence's blocks: full ones can be reused from now on."""
        sequence.num_computed_tokens += num_tokens
        start, end = sequence.num_cached_blocks, sequence.num_computed_tokens // self.pool.block_size
        if start < end and not sequence.uncacheable:
            keys = sequence.block_keys[start:end]
            num_cached = self.pool.cache_blocks(sequence.block_table, start, keys, sequence.request.root_hash)
            sequence.num_cached_blocks += num_cached
            sequence.uncacheable = num_cached < len(keys)

    def make_room(self, sequence: Sequence, num_drafts: int) -> int:
        """How many drafts behind its known tokens find room in its blocks. Takes new blocks for them only as far as no
        other running sequence needs them for its next token."""
        wanted = self._num_blocks(sequence.num_tokens + num_drafts) - len(sequence.block_table)
        spare = self.pool.num_available - len(self.running)
        if wanted > 0 and spare > 0:
            sequence.block_table += self.pool.allocate(min(wanted, spare))
        return min(num_drafts, len(sequence.block_table) * self.pool.block_size - sequence.num_tokens)

    def give_back_room(self, sequence: Sequence) -> None:
        """Free the blocks behind its known tokens: what lies there are drafts that were wrong."""
        num_needed = self._num_blocks(sequence.num_tokens)
        surplus = sequence.block_table[num_needed:]
        if surplus:
            del sequence.block_table[num_needed:]
            self.pool.free(surplus)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended, wherever it is, and free its blocks."""
        if sequence.is_running:
            self.running.remove(sequence)
            self._free(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.shares_with = None

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and sequences account for one another."""
        assert all(sequence.is_running for sequence in self.running), "a running sequence holds no blocks"
        assert not any(sequence.is_running for sequence in self.waiting), "a waiting sequence holds blocks"
        self.pool.check_integrity(sequence.block_table for sequence in self.running)

    def _sort_waiting(self, budget: int, prefill_tokens_per_second: float) -> None:
        """If somebody can be admitted at all; about 1 us for each that waits."""
        if len(self.waiting) < 2 or not budget or len(self.running) >= self.max_batch:
            return

        def rank(sequence: Sequence) -> float:
            if sequence.queue_time_seconds is not None:
                return float("-inf")  # it has run before: its client has seen the beginning of the answer
            keys = sequence.block_keys
            sequence.num_expected_blocks = count_cached_blocks(
                lambda position: self.pool.is_cached(keys[position].block_hash),
                sequence.num_reusable_blocks,
                sequence.num_expected_blocks,
            )
            num_uncached = sequence.num_tokens - sequence.num_expected_blocks * self.pool.block_size
            return admission_rank(num_uncached, prefill_tokens_per_second, sequence.submit_time)

        self.waiting = deque(sorted(self.waiting, key=rank))

    def _admit(self, batch: list[Chunk], budget: int) -> None:
        skipped: list[Sequence] = []
        while self.waiting and budget and len(self.running) < self.max_batch:
            sequence = self.waiting[0]
            if self._awaits_shared_prefix(sequence):
                skipped.append(self.waiting.popleft())
                continue
            if not self._allocate(sequence):
                break
            self.running.append(self.waiting.popleft())
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            budget -= num_tokens
            batch.append((sequence, num_tokens))
        self.waiting.extendleft(reversed(skipped))

    def _allocate(self, sequence: Sequence) -> bool:
        """Blocks for all its known tokens, from the cache as far as they lie there.

        One block is left over for every running sequence: else a newcomer would be preempted by their next tokens.
        """
        pool = self.pool
        matched = pool.match_prefix(sequence.block_keys[: sequence.num_reusable_blocks], sequence.request.root_hash)
        num_new = self._num_blocks(sequence.num_tokens) - len(matched)
        if pool.num_available - pool.num_evictable(matched) < num_new + len(self.running):
            return False
        pool.reference(matched)
        sequence.num_cached_blocks = len(matched)
        sequence.num_computed_tokens = len(matched) * pool.block_size
        sequence.block_table = matched + pool.allocate(num_new)
        sequence.uncacheable = False
        sequence.shares_with = None
        return True

    def _awaits_shared_prefix(self, sequence: Sequence) -> bool:
        """Whether a running prefill is about to compute what this sequence needs next: better reuse it than compute it
        twice. Costs no time, as that prefill has the first claim on the budget anyway."""
        if sequence.shares_with is None or not _is_computing(*sequence.shares_with):
            sequence.shares_with = self._find_shared_prefill(sequence)
        return sequence.shares_with is not None

    def _find_shared_prefill(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        limit = sequence.num_reusable_blocks * self.pool.block_size
        for other in self.running:
            if other.num_uncomputed_tokens > 1:
                num_common = min(sequence.num_common_tokens(other), limit)
                if _is_computing(other, num_common) and self._num_matched_tokens(sequence) < num_common:
                    return other, num_common
        return None

    def _num_matched_tokens(self, sequence: Sequence) -> int:
        return len(self.pool.match_prefix(sequence.block_keys, sequence.request.root_hash)) * self.pool.block_size

    def _append_block(self, sequence: Sequence) -> bool:
        """A block for the next token if it needs one, at the expense of the newest; False: it was itself the newest."""
        if len(sequence.block_table) * self.pool.block_size >= sequence.num_tokens:
            return True
        while not self.pool.num_available:
            newest = self.running.pop()
            self._preempt(newest)
            if newest is sequence:
                return False
        sequence.block_table += self.pool.allocate(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Give up its blocks; it waits at the front, and recomputes what is not in the cache any more by then."""
        self._free(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_table)
        sequence.block_table = []

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)


def _is_computing(sequence: Sequence, num_tokens: int) -> bool:
    """Whether a running sequence will bring its first `num_tokens` tokens (whole blocks) into the cache."""
    return sequence.is_running and not sequence.uncacheable and sequence.num_computed_tokens < num_tokens
