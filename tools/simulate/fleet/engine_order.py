"""In what order an engine prefills what it was given."""

from __future__ import annotations

import bisect
import operator
from collections import deque
from typing import Final, Protocol

from tools.simulate.fleet.fleet_model import Profile
from tools.simulate.fleet.kv_cache import KvCache
from tools.simulate.fleet.sequence import Sequence
from tools.simulate.fleet.step_time import prefill_seconds

AGING: Final = 0.25
"""Seconds of prefill that a second of waiting makes up for.

A sequence can only be overtaken by those that arrive within (its own prefill seconds / AGING) after it, so none
starves. Between 0.05 and 1 the mean TTFT hardly depends on it below capacity; above, less aging lowers the mean and
more the tail, and 0.25 gives up little of either."""


class EngineOrder(Protocol):
    """The waiting queue, and the order among prefills that have begun."""

    newcomers_may_pass: bool
    """Whether a sequence submitted now may go before one that waits already."""

    def __len__(self) -> int: ...

    def push(self, sequence: Sequence) -> None: ...

    def first(self) -> Sequence | None:
        """The one to be admitted next."""
        ...

    def pop_first(self) -> None: ...

    def remove(self, sequence: Sequence) -> None:
        """Take out one that was cancelled."""
        ...

    def goes_before(self, waiting: Sequence, begun: Sequence) -> bool:
        """Whether a waiting sequence gets its prefill before one that has begun."""
        ...

    def sort_begun(self, begun: list[Sequence]) -> None:
        """Bring prefills that have begun, in order of admission, into the order of their turns."""
        ...


class FirstComeFirstServed:
    newcomers_may_pass = False

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def first(self) -> Sequence | None:
        return self._waiting[0] if self._waiting else None

    def pop_first(self) -> None:
        self._waiting.popleft()

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)

    def goes_before(self, waiting: Sequence, begun: Sequence) -> bool:  # noqa: ARG002
        return False

    def sort_begun(self, begun: list[Sequence]) -> None:
        pass


class ShortestPrefillFirst:
    """The least prefill first: what is left to compute in seconds, less AGING times the seconds since submission.

    Everybody ages alike, so the order of two waiting sequences changes only when the cache does; a sequence's prefix is
    looked up when it is submitted and again when its turn has come.
    """

    newcomers_may_pass = True

    def __init__(self, profile: Profile, block_size: int, cache: KvCache) -> None:
        self._profile = profile
        self._block_size = block_size
        self._cache = cache
        self._waiting: list[tuple[float, int, Sequence]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, sequence: Sequence) -> None:
        self._count += 1
        sequence.order_key = self._key(sequence, self._num_reusable_tokens(sequence))
        bisect.insort(self._waiting, (sequence.order_key, self._count, sequence))

    def first(self) -> Sequence | None:
        """Evictions may have made the first one longer than the next: then they change places."""
        waiting = self._waiting
        while waiting:
            key, count, sequence = waiting[0]
            fresh = self._key(sequence, self._num_reusable_tokens(sequence))
            sequence.order_key = fresh
            if fresh <= key or len(waiting) == 1 or fresh <= waiting[1][0]:
                return sequence
            del waiting[0]
            bisect.insort(waiting, (fresh, count, sequence))
        return None

    def pop_first(self) -> None:
        del self._waiting[0]

    def remove(self, sequence: Sequence) -> None:
        self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]

    def goes_before(self, waiting: Sequence, begun: Sequence) -> bool:
        return waiting.order_key < begun.order_key

    def sort_begun(self, begun: list[Sequence]) -> None:
        for sequence in begun:
            sequence.order_key = self._key(sequence, sequence.num_computed_tokens)
        begun.sort(key=operator.attrgetter("order_key"))

    def _key(self, sequence: Sequence, num_done_tokens: int) -> float:
        seconds = prefill_seconds(self._profile, num_done_tokens, sequence.num_prompt_tokens - num_done_tokens)
        return seconds + AGING * sequence.submitted_at

    def _num_reusable_tokens(self, sequence: Sequence) -> int:
        num_reusable_blocks = (sequence.num_prompt_tokens - 1) // self._block_size
        return self._cache.count_cached(sequence.hashes, num_reusable_blocks) * self._block_size
