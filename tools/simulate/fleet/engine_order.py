"""The order in which a modelled engine prefills its sequences."""

from __future__ import annotations

import bisect
import operator
from typing import Final, Protocol

from kvloom_common.class_rank import INTERACTIVE_RANK
from shard_server.engines.prefill_order import PrefillOrder
from shard_server.engines.queue_order import CLASS_PATIENCE_SECONDS, class_order
from tools.simulate.fleet.kv_cache import ModelledKvCache
from tools.simulate.fleet.profile import Profile
from tools.simulate.fleet.sequence import ShardSequence
from tools.simulate.fleet.step_time import prefill_seconds

AGING: Final = 0.25
"""How many seconds of prefill a second of waiting compensates for.

A sequence can only be overtaken by those that arrive within (its own prefill seconds / AGING) after it, so none
starves. Between 0.05 and 1 the mean TTFT hardly depends on it below capacity; above capacity, less aging lowers
the mean and more aging lowers the tail, and 0.25 sacrifices little of either."""


class EngineOrder(Protocol):
    """The waiting queue, and the order among prefills that have begun."""

    @property
    def newcomers_may_pass(self) -> bool:
        """True when a new sequence may go before one that is already waiting."""
        ...

    def __len__(self) -> int: ...

    def push(self, sequence: ShardSequence) -> None: ...

    def first(self) -> ShardSequence | None:
        """The sequence to be admitted next."""
        ...

    def pop_first(self) -> None:
        """It is admitted, and its prefill begins."""
        ...

    def remove(self, sequence: ShardSequence) -> None:
        """Remove a sequence that is cancelled while it waits."""
        ...

    def note_end(self, sequence: ShardSequence) -> None:
        """A sequence has left the engine, after it was admitted or while it waited."""
        ...

    def sort_waiting(self) -> None:
        """A step begins, in which sequences are admitted in the order of this moment."""
        ...

    def goes_before(self, waiting: ShardSequence, begun: ShardSequence) -> bool:
        """True when a waiting sequence gets its prefill before one that has begun."""
        ...

    def sort_begun(self, begun: list[ShardSequence]) -> None:
        """Sort prefills that have begun, given in order of admission, by the order in which they continue."""
        ...


class FirstComeFirstServed:
    """Within a class and a tenant; between them as in the engines (shard_server/engines/prefill_order.py)."""

    def __init__(self, chunk_tokens: int) -> None:
        self._order = PrefillOrder(chunk_tokens)
        self._waiting: list[ShardSequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def newcomers_may_pass(self) -> bool:
        return self._order.has_tenants

    def push(self, sequence: ShardSequence) -> None:
        self._order.add(sequence)
        if self._order.has_tenants:  # they are sorted when a step begins
            self._waiting.append(sequence)
        else:
            bisect.insort(self._waiting, sequence, key=_class_order)

    def first(self) -> ShardSequence | None:
        return self._waiting[0] if self._waiting else None

    def pop_first(self) -> None:
        sequence = self._waiting.pop(0)
        self._order.begin(sequence, sequence.num_uncomputed_tokens)

    def remove(self, sequence: ShardSequence) -> None:
        self._waiting.remove(sequence)

    def note_end(self, sequence: ShardSequence) -> None:
        self._order.remove(sequence)

    def sort_waiting(self) -> None:
        if self._order.is_mixed:
            self._waiting = self._order.sort_waiting(self._waiting)

    def goes_before(self, waiting: ShardSequence, begun: ShardSequence) -> bool:
        return self._order.goes_before(waiting, begun)

    def sort_begun(self, begun: list[ShardSequence]) -> None:
        if self._order.is_mixed and len(begun) > 1:
            begun[:] = self._order.sort_begun(begun)


class ShortestPrefillFirst:
    """Orders sequences by their remaining prefill seconds minus AGING times the seconds since submission. Less urgent
    classes count as submitted later; tenants are not looked at.

    All sequences age alike, so that the order of two waiting ones changes only with the cache. The prefix of a sequence
    is looked up when it is submitted, and again when it is the first.
    """

    newcomers_may_pass = True

    def __init__(self, profile: Profile, block_size: int, cache: ModelledKvCache) -> None:
        self._profile = profile
        self._block_size = block_size
        self._cache = cache
        self._waiting: list[tuple[float, int, ShardSequence]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, sequence: ShardSequence) -> None:
        self._count += 1
        sequence.order_key = self._key(sequence, self._num_reusable_tokens(sequence))
        bisect.insort(self._waiting, (sequence.order_key, self._count, sequence))

    def first(self) -> ShardSequence | None:
        """Evictions may have made the first sequence longer than the next one. They are then swapped."""
        waiting = self._waiting
        while waiting:
            key, count, sequence = waiting[0]
            new_key = self._key(sequence, self._num_reusable_tokens(sequence))
            sequence.order_key = new_key
            if new_key <= key or len(waiting) == 1 or new_key <= waiting[1][0]:
                return sequence
            del waiting[0]
            bisect.insort(waiting, (new_key, count, sequence))
        return None

    def pop_first(self) -> None:
        del self._waiting[0]

    def remove(self, sequence: ShardSequence) -> None:
        self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]

    def note_end(self, sequence: ShardSequence) -> None:
        """The order keeps nothing of those that are admitted."""

    def sort_waiting(self) -> None:
        """They always are."""

    def goes_before(self, waiting: ShardSequence, begun: ShardSequence) -> bool:
        return waiting.order_key < begun.order_key

    def sort_begun(self, begun: list[ShardSequence]) -> None:
        for sequence in begun:
            sequence.order_key = self._key(sequence, sequence.num_computed_tokens)
        begun.sort(key=operator.attrgetter("order_key"))

    def _key(self, sequence: ShardSequence, num_done_tokens: int) -> float:
        seconds = prefill_seconds(self._profile, num_done_tokens, sequence.num_prompt_tokens - num_done_tokens)
        num_less_urgent = sequence.class_rank - INTERACTIVE_RANK
        return seconds + AGING * (sequence.submit_time + num_less_urgent * CLASS_PATIENCE_SECONDS)

    def _num_reusable_tokens(self, sequence: ShardSequence) -> int:
        num_reusable_blocks = (sequence.num_prompt_tokens - 1) // self._block_size
        return self._cache.count_cached(sequence.hashes, num_reusable_blocks) * self._block_size


def _class_order(sequence: ShardSequence) -> float:
    return class_order(sequence.class_rank, sequence.submit_time)
