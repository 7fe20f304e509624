"""Batch jobs between the calls of a trace: document processing over long prompts, with long answers.

A job is submitted at once: all its calls begin with the same instructions and then differ. Jobs arrive at times that
are uniform over the trace, which is a Poisson process with a known number of arrivals. Lengths are log-normal.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator
from typing import Final

from tools.simulate.traces.trace import HashRuns, MeasuredWorkload, hash_base
from tools.simulate.workload import Call

CALLS_PER_JOB: Final = 16
INSTRUCTION_TOKENS: Final = 1024
MEDIAN_PROMPT_TOKENS: Final = 16_384
MEDIAN_OUTPUT_TOKENS: Final = 768
SPREAD: Final = 0.6
"""The standard deviation of the logarithms of both lengths."""
MAX_PROMPT_TOKENS: Final = 65_536
MAX_OUTPUT_TOKENS: Final = 4096


class MixedWorkload:
    """The calls of a workload with given arrivals, all interactive, and batch calls that make up `batch_share` of both
    together. The same seed gives the same jobs at every load."""

    def __init__(self, inner: MeasuredWorkload, batch_share: float, seed: int) -> None:
        """Raises ValueError for a share that is not between 0 and 1."""
        if not 0 < batch_share < 1:
            raise ValueError(f"the share of batch calls must be between 0 and 1, not {batch_share}")
        self.block_size = inner.block_size
        interactive = list(inner.first_calls())
        num_batch_calls = round(len(interactive) * batch_share / (1 - batch_share))
        first_id = 1 + max((call.call_id for _, call in interactive), default=-1)
        end = interactive[-1][0] if interactive else 0.0
        batch = _batch_calls(num_batch_calls, first_id, end, self.block_size, random.Random(f"batch {seed}"))
        self._arrivals = list(heapq.merge(interactive, batch, key=lambda arrival: arrival[0]))

    @property
    def num_measured_calls(self) -> int:
        return len(self._arrivals)

    def first_calls(self) -> Iterable[tuple[float, Call]]:
        return self._arrivals

    def next_calls(self, ended: Call, now: float) -> Iterable[tuple[float, Call]]:  # noqa: ARG002  (open loop)
        return ()


def _batch_calls(
    num_calls: int, first_id: int, end: float, block_size: int, chooser: random.Random
) -> Iterator[tuple[float, Call]]:
    """By ascending arrival, from 0 to `end` seconds."""
    num_jobs = math.ceil(num_calls / CALLS_PER_JOB)
    starts = sorted(chooser.random() for _ in range(num_jobs))
    for number in range(num_calls):
        job = number // CALLS_PER_JOB
        num_prompt_tokens = INSTRUCTION_TOKENS + _length(chooser, MEDIAN_PROMPT_TOKENS, MAX_PROMPT_TOKENS)
        num_output_tokens = _length(chooser, MEDIAN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS)
        num_shared_blocks = INSTRUCTION_TOKENS // block_size
        shared, own = hash_base("batch job", job), hash_base("batch call", number)
        num_own_blocks = num_prompt_tokens // block_size - num_shared_blocks
        hashes = HashRuns((range(shared, shared + num_shared_blocks), range(own, own + num_own_blocks)))
        call = Call(first_id + number, num_prompt_tokens, num_output_tokens, hashes, is_batch=True)
        yield starts[job] * end, call


def _length(chooser: random.Random, median: int, maximum: int) -> int:
    return max(1, min(round(median * math.exp(SPREAD * chooser.gauss(0, 1))), maximum))
