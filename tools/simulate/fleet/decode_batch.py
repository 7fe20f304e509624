"""The sequences of a shard that are in decode, kept as sums: a step costs the same however many they are."""

from __future__ import annotations

import heapq

from tools.simulate.fleet.sequence import Sequence


class DecodeBatch:
    """Counts the shard's steps; every sequence gets one token a step."""

    def __init__(self, num_routers: int) -> None:
        self.num_sequences = 0
        self.num_context_tokens = 0
        """Prompt and output tokens so far."""
        self.num_sequences_of = [0] * num_routers
        self.num_context_tokens_of = [0] * num_routers
        self._step = 0
        """Steps that have ended."""
        self._ends: list[tuple[int, int, Sequence]] = []
        """Heap by end_step, then in order of joining. Those that left early stay in it until then."""
        self._num_joined = 0

    def join(self, sequence: Sequence) -> None:
        """It has its first token."""
        sequence.end_step = self._step + sequence.num_output_tokens - 1
        self._num_joined += 1
        heapq.heappush(self._ends, (sequence.end_step, self._num_joined, sequence))
        self._count(sequence, 1, sequence.num_prompt_tokens + 1)

    def leave(self, sequence: Sequence) -> None:
        """Before its end or at it."""
        assert sequence.end_step is not None
        num_generated = sequence.num_output_tokens - (sequence.end_step - self._step)
        self._count(sequence, -1, -(sequence.num_prompt_tokens + num_generated))
        sequence.end_step = None

    def advance(self, num_steps: int) -> list[Sequence]:
        """Every sequence is `num_steps` tokens further; returns those that have all of theirs, who are to leave."""
        self._step += num_steps
        self.num_context_tokens += num_steps * self.num_sequences
        for index, num_sequences in enumerate(self.num_sequences_of):
            self.num_context_tokens_of[index] += num_steps * num_sequences
        done: list[Sequence] = []
        ends, step = self._ends, self._step
        while ends and ends[0][0] <= step:
            end_step, _, sequence = heapq.heappop(ends)
            if sequence.end_step == end_step:
                done.append(sequence)
        return done

    def count_steps_to_end(self) -> int:
        """Until the first sequence has all its tokens. There must be one."""
        ends = self._ends
        while ends[0][2].end_step is None:
            heapq.heappop(ends)
        return ends[0][0] - self._step

    def _count(self, sequence: Sequence, num_sequences: int, num_context_tokens: int) -> None:
        self.num_sequences += num_sequences
        self.num_context_tokens += num_context_tokens
        self.num_sequences_of[sequence.router_index] += num_sequences
        self.num_context_tokens_of[sequence.router_index] += num_context_tokens
