"""One sequence on a modelled shard, and those that decode, kept as sums: a step costs the same for any number."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvloom_common.class_rank import INTERACTIVE_RANK
from tools.simulate.fleet.kv_cache import Lease


class ShardSequence:
    """A sequence from its submission to its end."""

    __slots__ = (
        "admitted_at",
        "class_rank",
        "end_step",
        "hashes",
        "is_cancelled",
        "lease",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_expected_prefill_tokens",
        "num_fetched_blocks",
        "num_output_tokens",
        "num_prompt_tokens",
        "order_key",
        "router_index",
        "slot",
        "submit_time",
        "tenant",
        "turn",
    )

    def __init__(
        self,
        *,
        slot: int,
        num_prompt_tokens: int,
        num_output_tokens: int,
        hashes: Sequence[int],
        num_expected_cached_tokens: int = 0,
        router_index: int = 0,
        submit_time: float = 0.0,
        class_rank: int = INTERACTIVE_RANK,
        tenant: str = "",
    ) -> None:
        self.slot = slot
        """The slot on the stream between the router and this shard."""
        self.router_index = router_index
        self.class_rank = class_rank
        self.tenant = tenant
        self.turn = 0
        """See shard_server/engines/prefill_order.py."""
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = num_output_tokens
        self.num_expected_prefill_tokens = max(1, num_prompt_tokens - num_expected_cached_tokens)
        """The prefill tokens that the router expected."""
        self.hashes = hashes
        """The hashes of the full blocks of the prompt."""
        self.submit_time = submit_time
        self.admitted_at = 0.0
        self.lease: Lease | None = None
        """Its blocks while it runs."""
        self.num_computed_tokens = 0
        """Prompt tokens that are computed, including reused ones."""
        self.num_cached_tokens = 0
        """Prompt tokens that were found in the cache or fetched."""
        self.num_fetched_blocks = 0
        """How many leading blocks will be present after the current fetch from another shard. 0 if there is none."""
        self.end_step: int | None = None
        """The step of the shard that yields its last token. None while it is not decoding."""
        self.is_cancelled = False
        self.order_key = 0.0
        """See engine_order."""

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_computed_tokens


class DecodeBatch:
    """Counts the steps of the shard. Every sequence gets one token per step."""

    def __init__(self, num_routers: int) -> None:
        self.num_sequences = 0
        self.num_context_tokens = 0
        """Prompt tokens and output tokens so far."""
        self.num_sequences_of = [0] * num_routers
        self.num_context_tokens_of = [0] * num_routers
        self._step = 0
        """The number of steps that have ended."""
        self._ends: list[tuple[int, int, ShardSequence]] = []
        """A heap by end_step and then by order of joining. Sequences that left early stay in it until their
        end_step."""
        self._num_joined = 0

    def join(self, sequence: ShardSequence) -> None:
        """Add a sequence that has its first token."""
        sequence.end_step = self._step + sequence.num_output_tokens - 1
        self._num_joined += 1
        heapq.heappush(self._ends, (sequence.end_step, self._num_joined, sequence))
        self._count(sequence, 1, sequence.num_prompt_tokens + 1)

    def leave(self, sequence: ShardSequence) -> None:
        """Remove a sequence, at its end or before."""
        self._count(sequence, -1, -(sequence.num_prompt_tokens + self.num_generated(sequence)))
        sequence.end_step = None

    def num_generated(self, sequence: ShardSequence, num_later_steps: int = 0) -> int:
        """How many output tokens a sequence has after so many more steps; 0: it does not decode yet."""
        if sequence.end_step is None:
            return 0
        return sequence.num_output_tokens - (sequence.end_step - self._step) + num_later_steps

    def advance(self, num_steps: int) -> list[ShardSequence]:
        """Give every sequence `num_steps` tokens. Returns the complete ones, which the caller must remove."""
        self._step += num_steps
        self.num_context_tokens += num_steps * self.num_sequences
        for index, num_sequences in enumerate(self.num_sequences_of):
            self.num_context_tokens_of[index] += num_steps * num_sequences
        done: list[ShardSequence] = []
        ends, step = self._ends, self._step
        while ends and ends[0][0] <= step:
            end_step, _, sequence = heapq.heappop(ends)
            if sequence.end_step == end_step:
                done.append(sequence)
        return done

    def count_steps_to_end(self) -> int:
        """The number of steps until the first sequence is complete. There must be a sequence."""
        ends = self._ends
        while ends[0][2].end_step is None:
            heapq.heappop(ends)
        return ends[0][0] - self._step

    def _count(self, sequence: ShardSequence, num_sequences: int, num_context_tokens: int) -> None:
        self.num_sequences += num_sequences
        self.num_context_tokens += num_context_tokens
        self.num_sequences_of[sequence.router_index] += num_sequences
        self.num_context_tokens_of[sequence.router_index] += num_context_tokens
