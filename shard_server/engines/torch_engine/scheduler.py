"""Decides what the next step computes: admission in order, chunked prefill, prefix reuse, preemption by recompute.

Why it cannot livelock: `running` is in order of admission and only its newest member is ever preempted, so the oldest
one runs to its end; and since every sequence fits alone (the engine refuses longer ones), the oldest always finds its
blocks. That holds for any order of admission. Nor does any sequence starve: preempted ones are admitted before those
that have not run yet, and the first in the queue is never skipped for lack of blocks; for the others, the queue order
bounds how long one can be overtaken (queue_order.py).

With sequences of several classes (EngineRequest.class_rank) or tenants, prefill of the most urgent class comes first in
a step, and within a class that of the tenant with least prefill; a waiting sequence is admitted before other prefill
continues (prefill_order.py). Decoding sequences are never held up. A class goes before another one for a bounded time
only, and a tenant until it has had as much as the other, so that none starves; and since only the order of admission
and of prefill changes, it cannot livelock either.

With guaranteed shares of blocks (eviction_order.py) both still hold. A sequence may evict what others' shares protect
only as the last resort: if waiting would not help, since all other sequences keep within their shares. The first in the
queue is overtaken only while it waits for blocks outside of the shares, and only by sequences that keep within theirs:
those use nothing that it waits for, and what it waits for comes back when the sequences end that use it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Final, Literal

from shard_server.engines.base import LoadShare
from shard_server.engines.eviction_order import has_others_outside, preempted_for
from shard_server.engines.prefill_order import PrefillOrder
from shard_server.engines.queue_order import MAX_PATIENCE_SECONDS, admission_rank, class_order, count_cached_blocks
from shard_server.engines.torch_engine.block_pool import BlockPool
from shard_server.engines.torch_engine.sequence import Sequence

MAX_PREFILL_SECONDS_PER_STEP: Final = 1.0
"""The longest time that decoding sequences wait for prefill. It is short against the silence after which routers
consider a shard stalled (`router.health.stall_seconds`): a CPU without bf16 arithmetic takes 25 ms per token."""
MIN_PREFILL_TOKENS_PER_STEP: Final = 32
"""The minimum on a slow machine: fewer tokens take hardly less time."""

MAX_PROMPT_LOGITS_PER_STEP: Final = 256
"""The maximum number of prompt tokens in a step whose logits are wanted: each takes as many floats as there are tokens
in the vocabulary."""
_MIN_PROMPT_LOGITS_PER_STEP: Final = 16
_PROMPT_LOGITS_BYTES: Final = 24 * 2**20
"""The logits of prompts take at most so many bytes of a CPU's memory. The C library takes arrays of 32 MiB and more
from the system each time, and returns them: the page faults make logits cost a third more."""

Chunk = tuple[Sequence, int]
"""A sequence and the number of its uncomputed tokens that a step computes."""


def max_prompt_logits_on_cpu(vocab_size: int) -> int:
    """The maximum number of prompt tokens in a step whose logits are wanted, if the logits are in the CPU's memory."""
    num_rows = _PROMPT_LOGITS_BYTES // (4 * vocab_size)
    return min(max(num_rows, _MIN_PROMPT_LOGITS_PER_STEP), MAX_PROMPT_LOGITS_PER_STEP)


class Scheduler:
    """Decides but computes nothing. `max_prefill_tokens_per_step` bounds how long a step can stall decoding sequences,
    as does MAX_PREFILL_SECONDS_PER_STEP on a slow machine."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch: int,
        max_prefill_tokens_per_step: int,
        max_prompt_logits_per_step: int = MAX_PROMPT_LOGITS_PER_STEP,
        queue_order: Literal["fcfs", "shortest_prefill"] = "fcfs",
    ) -> None:
        self.pool = pool
        self.max_batch = max_batch
        self.max_prefill_tokens_per_step = max_prefill_tokens_per_step
        self.max_prompt_logits_per_step = max_prompt_logits_per_step
        self.queue_order = queue_order
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._order = PrefillOrder(max_prefill_tokens_per_step)
        self._num_prompt_logits_left = 0
        """How many more prompt tokens of this step may have logits."""

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def load_shares(self) -> defaultdict[int, LoadShare]:
        """The load by origin. Waiting sequences count the prefill that their router expects."""
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
        self._order.add(sequence)

    def schedule(self, prefill_tokens_per_second: float = 0.0, *, is_ahead: bool = False) -> list[Chunk]:
        """One step's work: every decoding sequence, then as much prefill as the budget allows. Empty only if there is
        no work. The speed bounds the budget and ranks the waiting sequences; if it is unknown (0), they stay in the
        order of arrival.

        `is_ahead`: tokens of the step before are still being drawn. Sequences that end with them have no work, and none
        is preempted: if that were necessary, the result is empty."""
        budget = self.prefill_budget(prefill_tokens_per_second)
        self._num_prompt_logits_left = self.max_prompt_logits_per_step
        is_mixed = self._order.is_mixed
        batch: list[Chunk] = []
        index = 0
        while index < len(self.running):  # preemption removes members after `index`
            sequence = self.running[index]
            index += 1
            num_tokens = sequence.num_uncomputed_tokens
            if num_tokens > 1:
                if is_mixed:
                    continue
                num_tokens = self._chunk_size(sequence, budget)
                budget -= num_tokens
                if not num_tokens:
                    continue
            elif not num_tokens:
                continue
            elif is_ahead and not self._has_block(sequence):
                return []
            elif not self._append_block(sequence):
                break
            batch.append((sequence, num_tokens))
        if self.queue_order == "shortest_prefill" and prefill_tokens_per_second:
            self._sort_waiting(budget, prefill_tokens_per_second)
        elif is_mixed:
            self.waiting = deque(self._order.sort_waiting(self.waiting))
        if is_mixed:
            budget = self._continue_prefill(batch, budget)
        self._admit(batch, budget)
        assert batch or is_ahead or not self.has_work, "there is work, but none of it can be scheduled"
        return batch

    def prefill_budget(self, prefill_tokens_per_second: float) -> int:
        """The largest number of prefill tokens in a step."""
        if not prefill_tokens_per_second:
            return self.max_prefill_tokens_per_step
        num_in_time = int(prefill_tokens_per_second * MAX_PREFILL_SECONDS_PER_STEP)
        return min(max(num_in_time, MIN_PREFILL_TOKENS_PER_STEP), self.max_prefill_tokens_per_step)

    def mark_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of the next `num_tokens` tokens is in the sequence's blocks; full blocks can be reused from now on."""
        sequence.num_computed_tokens += num_tokens
        start, end = sequence.num_cached_blocks, sequence.num_computed_tokens // self.pool.block_size
        if start < end and not sequence.uncacheable:
            keys = sequence.block_keys[start:end]
            num_cached = self.pool.cache_blocks(sequence.block_table, start, keys, sequence.request.root_hash)
            sequence.num_cached_blocks += num_cached
            sequence.uncacheable = num_cached < len(keys)

    def reserve_draft_blocks(self, sequence: Sequence, num_drafts: int) -> int:
        """Make room for drafts after the known tokens; returns how many fit. New blocks are taken only if no other
        running sequence needs them for its next token."""
        wanted = self._num_blocks(sequence.num_tokens + num_drafts) - len(sequence.block_table)
        spare = self.pool.num_available_to(sequence.owner) - len(self.running)
        if wanted > 0 and spare > 0:
            sequence.block_table += self.pool.allocate(min(wanted, spare), sequence.owner)
        return min(num_drafts, len(sequence.block_table) * self.pool.block_size - sequence.num_tokens)

    def release_draft_blocks(self, sequence: Sequence) -> None:
        """Free the blocks after the known tokens, which hold only wrong drafts."""
        num_needed = self._num_blocks(sequence.num_tokens)
        surplus = sequence.block_table[num_needed:]
        if surplus:
            del sequence.block_table[num_needed:]
            self.pool.free(surplus)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, running or waiting, and free its blocks."""
        self._order.remove(sequence)
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
        self._order.check_integrity((*self.running, *self.waiting))
        self.pool.check_integrity(sequence.block_table for sequence in self.running)

    def _sort_waiting(self, budget: int, prefill_tokens_per_second: float) -> None:
        """Sort the queue if any sequence can be admitted; takes about 1 us per waiting sequence."""
        if len(self.waiting) < 2 or not budget or len(self.running) >= self.max_batch:
            return

        def rank(sequence: Sequence) -> float:
            if sequence.queue_time_seconds is not None:  # its client has seen the beginning of the answer
                order = class_order(sequence.class_rank, sequence.submit_time)
                return order - MAX_PATIENCE_SECONDS if self._order.is_mixed else float("-inf")
            keys = sequence.block_keys
            sequence.num_expected_blocks = count_cached_blocks(
                lambda position: self.pool.is_cached(keys[position].block_hash),
                sequence.num_reusable_blocks,
                sequence.num_expected_blocks,
            )
            num_uncached = sequence.num_tokens - sequence.num_expected_blocks * self.pool.block_size
            return admission_rank(num_uncached, prefill_tokens_per_second, sequence.submit_time, sequence.class_rank)

        self.waiting = deque(self._order.sort_waiting(self.waiting, rank))

    def _continue_prefill(self, batch: list[Chunk], budget: int) -> int:
        """Continue prefill that has begun, in the order of classes and tenants; waiting sequences that it gives way to
        are admitted before it. Returns what is left of the budget."""
        begun = [sequence for sequence in self.running if sequence.num_uncomputed_tokens > 1]
        for sequence in self._order.sort_begun(begun):
            budget = self._admit(batch, budget, before=sequence)
            num_tokens = self._chunk_size(sequence, budget)
            if num_tokens:
                budget -= num_tokens
                batch.append((sequence, num_tokens))
        return budget

    def _admit(self, batch: list[Chunk], budget: int, before: Sequence | None = None) -> int:
        """Admit waiting sequences as long as there is a budget, of which the rest is returned; with `before` only those
        that prefill of this sequence gives way to."""
        skipped: list[Sequence] = []
        is_first_blocked = False
        while self.waiting and budget and len(self.running) < self.max_batch:
            sequence = self.waiting[0]
            if before is not None and not self._order.goes_before(sequence, before):
                break
            if (is_first_blocked and not self._fits_into_share(sequence)) or self._awaits_shared_prefix(sequence):
                skipped.append(self.waiting.popleft())
                continue
            if not self._num_prompt_logits_left and sequence.next_prompt_logits is not None:
                break
            if not self._allocate(sequence):
                if not self.pool.order.has_shares or not self.pool.order.uses_lent_blocks:
                    break
                is_first_blocked = True
                skipped.append(self.waiting.popleft())
                continue
            self.running.append(self.waiting.popleft())
            self._order.begin(sequence, sequence.num_uncomputed_tokens)
            num_tokens = self._chunk_size(sequence, budget)
            budget -= num_tokens
            batch.append((sequence, num_tokens))
        self.waiting.extendleft(reversed(skipped))
        return budget

    def _chunk_size(self, sequence: Sequence, budget: int) -> int:
        """How many of a sequence's uncomputed tokens fit into the step."""
        num_tokens = min(sequence.num_uncomputed_tokens, budget)
        num_logits = sequence.num_prompt_logits(num_tokens)
        if num_logits:
            num_allowed = min(num_logits, self._num_prompt_logits_left)
            num_tokens -= num_logits - num_allowed
            self._num_prompt_logits_left -= num_allowed
        return num_tokens

    def _allocate(self, sequence: Sequence) -> bool:
        """Allocate blocks for all known tokens, from the cache as far as possible; returns False if too few are left.

        One block is left for every running sequence: otherwise their next tokens would preempt the new one.
        """
        pool = self.pool
        matched = pool.match_prefix(sequence.block_keys[: sequence.num_reusable_blocks], sequence.request.root_hash)
        num_new = self._num_blocks(sequence.num_tokens) - len(matched)
        owner, is_last_resort = sequence.owner, not pool.order.uses_lent_blocks
        num_available = pool.num_available if is_last_resort else pool.num_available_to(owner)
        if num_available - pool.num_evictable(matched) < num_new + len(self.running):
            return False
        pool.reference(matched, owner)
        sequence.num_cached_blocks = len(matched)
        sequence.num_computed_tokens = len(matched) * pool.block_size
        sequence.block_table = matched + pool.allocate(num_new, owner)
        # An embedding's blocks would only displace those of prompts that come again.
        sequence.uncacheable = sequence.pooled is not None or sequence.request.discards_blocks
        sequence.shares_with = None
        return True

    def _awaits_shared_prefix(self, sequence: Sequence) -> bool:
        """True when a running prefill is about to compute the prefix that this sequence needs next. Waiting for it
        avoids computing the prefix twice and costs no time, since that prefill comes first in the budget anyway, unless
        it gives way to this sequence."""
        if sequence.shares_with is None or not _is_computing(*sequence.shares_with):
            sequence.shares_with = self._find_shared_prefill(sequence)
        return sequence.shares_with is not None

    def _find_shared_prefill(self, sequence: Sequence) -> tuple[Sequence, int] | None:
        limit = sequence.num_reusable_blocks * self.pool.block_size
        for other in self.running:
            if other.num_uncomputed_tokens > 1 and not self._order.goes_before(sequence, other):
                num_common = min(sequence.num_common_tokens(other), limit)
                if _is_computing(other, num_common) and self._num_matched_tokens(sequence) < num_common:
                    return other, num_common
        return None

    def _num_matched_tokens(self, sequence: Sequence) -> int:
        return len(self.pool.match_prefix(sequence.block_keys, sequence.request.root_hash)) * self.pool.block_size

    def _fits_into_share(self, sequence: Sequence) -> bool:
        """True when a waiting sequence would use no blocks beyond its owner's guarantee."""
        owner = sequence.owner
        return owner.num_used + self._num_blocks(sequence.num_tokens) <= owner.guarantee

    def _has_block(self, sequence: Sequence) -> bool:
        """True when there is a block for the next token without preempting a sequence."""
        has_room = len(sequence.block_table) * self.pool.block_size >= sequence.num_tokens
        return has_room or self.pool.num_available_to(sequence.owner) > 0

    def _append_block(self, sequence: Sequence) -> bool:
        """Allocate a block for the next token if needed, by preempting newer sequences; False if that was `sequence`
        itself."""
        if len(sequence.block_table) * self.pool.block_size >= sequence.num_tokens:
            return True
        pool = self.pool
        while not pool.num_available_to(sequence.owner):
            if pool.num_available and not has_others_outside(sequence, self.running):
                break
            preempted = preempted_for(sequence, self.running)
            self.running.remove(preempted)
            self._preempt(preempted)
            if preempted is sequence:
                return False
        sequence.block_table += pool.allocate(1, sequence.owner)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Free the sequence's blocks. It waits at the front and later recomputes what is no longer in the cache."""
        self._free(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_table)
        sequence.block_table = []

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)


def _is_computing(sequence: Sequence, num_tokens: int) -> bool:
    """True when a running sequence will put its first `num_tokens` tokens (whole blocks) into the cache."""
    return sequence.is_running and not sequence.uncacheable and sequence.num_computed_tokens < num_tokens
