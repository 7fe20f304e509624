"""A modelled shard that simulates every step. tools.simulate.fleet.shard must behave exactly like it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tests.fakes.naive_kv_cache import NaiveKvCache, NaiveLease
from tools.simulate.fleet.profile import Profile


@dataclasses.dataclass
class NaiveSequence:
    slot: int
    num_prompt_tokens: int
    num_output_tokens: int
    hashes: Sequence[int]
    lease: NaiveLease | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    was_cancelled: bool = False

    @property
    def is_decoding(self) -> bool:
        return self.num_generated_tokens > 0


class NaiveShard:
    """Serves sequences first come, first served only."""

    def __init__(self, profile: Profile, block_size: int, num_blocks: int) -> None:
        self.profile = profile
        self.block_size = block_size
        self.cache = NaiveKvCache(num_blocks)
        self.waiting: list[NaiveSequence] = []
        self.running: list[NaiveSequence] = []
        self.cancelled: list[NaiveSequence] = []
        self.step_began_at = 0.0
        self.step_ends_at = math.inf
        self.chunks: list[tuple[NaiveSequence, int]] = []
        self.kv_changes: list[tuple[list[int], list[int]]] = []
        """The stored and removed hashes of each step that changed the cache."""
        self.decode_step_seconds = 0.0

    def submit(self, sequence: NaiveSequence, now: float) -> None:
        self.waiting.append(sequence)
        if self.step_ends_at == math.inf:
            self._begin_step(now)

    def cancel(self, sequence: NaiveSequence) -> None:
        if sequence.ended_at is None:
            self.cancelled.append(sequence)

    def run_until(self, now: float) -> None:
        while self.step_ends_at < now:
            at = self.step_ends_at
            self._end_step(at)
            self._begin_step(at)

    @property
    def num_queued_prefill_tokens(self) -> int:
        waiting = sum(sequence.num_prompt_tokens for sequence in self.waiting)
        return waiting + sum(s.num_prompt_tokens - s.num_computed_tokens for s in self.running)

    @property
    def num_decode_context_tokens(self) -> int:
        return sum(s.num_prompt_tokens + s.num_generated_tokens for s in self.running if s.is_decoding)

    def _begin_step(self, now: float) -> None:
        self.step_began_at, self.step_ends_at = now, math.inf
        budget = self.profile.chunk_tokens
        for sequence in self.running:
            count = min(budget, sequence.num_prompt_tokens - sequence.num_computed_tokens)
            if count:
                self.chunks.append((sequence, count))
                budget -= count
        while budget and self.waiting and len(self.running) < self.profile.max_batch:
            sequence = self.waiting[0]
            num_blocks = -(-(sequence.num_prompt_tokens + sequence.num_output_tokens) // self.block_size)
            num_reusable = (sequence.num_prompt_tokens - 1) // self.block_size
            sequence.lease = self.cache.admit(sequence.hashes, num_reusable, num_blocks)
            if sequence.lease is None:
                break
            self.running.append(self.waiting.pop(0))
            sequence.num_computed_tokens = sequence.num_cached_tokens = sequence.lease.num_cached * self.block_size
            count = min(budget, sequence.num_prompt_tokens - sequence.num_computed_tokens)
            self.chunks.append((sequence, count))
            budget -= count
        if self.running:
            self.step_ends_at = now + self._step_seconds()

    def _step_seconds(self) -> float:
        profile = self.profile
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        seconds = max(
            profile.step_floor_seconds, profile.seconds_per_prefill_token * sum(count for _, count in self.chunks)
        )
        for sequence, count in self.chunks:
            middle = sequence.num_computed_tokens + count / 2
            seconds += profile.seconds_per_attention_pair * count * middle
        seconds += profile.seconds_per_context_token * self.num_decode_context_tokens
        return seconds + profile.seconds_per_decode_sequence * len(decoding)

    def _end_step(self, now: float) -> None:
        seconds = now - self.step_began_at
        if not self.chunks:
            known = self.decode_step_seconds
            self.decode_step_seconds = 0.9 * known + 0.1 * seconds if known else seconds
        stored: list[int] = []
        for sequence in [s for s in self.running if s.is_decoding]:
            sequence.num_generated_tokens += 1
            self._end_if_done(sequence, now)
        for sequence, count in self.chunks:
            assert sequence.lease is not None
            sequence.num_computed_tokens += count
            num_full = min(sequence.num_computed_tokens // self.block_size, len(sequence.hashes))
            stored += self.cache.store(sequence.lease, num_full)
            if sequence.num_computed_tokens == sequence.num_prompt_tokens:
                sequence.num_generated_tokens = 1
                sequence.started_at = now
                self._end_if_done(sequence, now)
        self.chunks = []
        for sequence in self.cancelled:
            if sequence.ended_at is None:
                sequence.was_cancelled = True
                self._end(sequence, now)
        self.cancelled = []
        removed = self.cache.take_evicted()
        if stored or removed:
            self.kv_changes.append((stored, sorted(removed)))

    def _end_if_done(self, sequence: NaiveSequence, now: float) -> None:
        if sequence.num_generated_tokens == sequence.num_output_tokens:
            self._end(sequence, now)

    def _end(self, sequence: NaiveSequence, now: float) -> None:
        sequence.ended_at = now
        if sequence.lease is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.cache.free(sequence.lease)
