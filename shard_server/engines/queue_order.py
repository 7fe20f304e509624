"""The waiting sequences of an engine, and the order in which they are admitted: the most urgent class first, and if the
configuration says so the shortest prefill first; both with aging. Pure; shared by the engines.

Each rank by which a class is less urgent counts as CLASS_PATIENCE_SECONDS of waiting, so that the order of classes is
that of `submit time + rank x CLASS_PATIENCE_SECONDS`. Prefill that has begun follows the same order, and within a class
tenants take turns: prefill_order.py.

With shortest prefill first, a sequence's rank is its uncached prefill in seconds less AGING times the seconds it has
waited; the lowest goes first. Time passes equally for all waiting sequences, so the order is that of `submit time +
prefill seconds / AGING`, which needs no clock. The amount added to the submit time is the sequence's patience: a
sequence that is submitted after it by more than its patience never goes before it. The patience is bounded, and with it
the time for which a sequence can be overtaken, however long its prompt and however many short prompts arrive.

Measured with a queue at one engine, prompts as long as in Mooncake's conversation trace, mean / p99 time to the first
token against first come, first served: 0.64 / 0.81 times at a load of 0.7, 0.49 / 0.94 times at 0.85 (AGING 0.25: 0.68
/ 0.82 and 0.64 / 0.93; AGING 0.05: 0.63 / 0.82 and 0.45 / 0.92, with twice the longest wait).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvloom_common.class_rank import INTERACTIVE_RANK
from shard_server.engines.base import EngineRequest

AGING: Final = 0.1
"""The seconds of prefill that one second of waiting compensates."""
MAX_PATIENCE_SECONDS: Final = 30.0
CLASS_PATIENCE_SECONDS: Final = 30.0
"""The seconds of waiting that make up for one rank of the class."""


def class_order(class_rank: int, submit_time: float) -> float:
    """The lower goes first; equal ones are in the order of arrival. Comparable only for one clock."""
    return submit_time + (class_rank - INTERACTIVE_RANK) * CLASS_PATIENCE_SECONDS


def admission_rank(
    num_uncached_tokens: int, prefill_tokens_per_second: float, submit_time: float, class_rank: int = INTERACTIVE_RANK
) -> float:
    """Lower goes first; equal ranks are in the order of arrival. Comparable only for one speed and one clock."""
    prefill_seconds = num_uncached_tokens / prefill_tokens_per_second
    return class_order(class_rank, submit_time) + min(prefill_seconds / AGING, MAX_PATIENCE_SECONDS)


def count_cached_blocks(is_cached: Callable[[int], bool], num_blocks: int, known: int) -> int:
    """How many of a sequence's first `num_blocks` blocks are cached now; `is_cached` takes a block's position.

    A block is cached only while its parent is, so two look-ups are enough if exactly the `known` ones are still cached.
    """
    count = min(known, num_blocks)
    if count and not is_cached(count - 1):
        while count and not is_cached(count - 1):
            count -= 1
        return count
    while count < num_blocks and is_cached(count):
        count += 1
    return count


class QueuedRequest:
    """An OrderedSequence (prefill_order.py), from which engines derive their sequences."""

    __slots__ = ("request", "submit_time", "turn")

    def __init__(self, request: EngineRequest, submit_time: float) -> None:
        self.request = request
        self.submit_time = submit_time
        self.turn = 0
        """See PrefillOrder."""

    @property
    def class_rank(self) -> int:
        return self.request.class_rank

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def num_expected_prefill_tokens(self) -> int:
        return self.request.num_expected_prefill_tokens
