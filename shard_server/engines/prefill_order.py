"""Chooses the sequence whose prefill is computed next: one of the most urgent class, and within a class one of the
tenant with least service. Pure; shared by the engines, and by the shards of `kvloom simulate`.

Classes: the order of `submit time + rank x CLASS_PATIENCE_SECONDS` (queue_order.py) decides which places of the queue
each class has. Prefill that has begun gives way to a waiting sequence of a more urgent class at the next step.

Tenants: which sequences of a class take its places is decided by a counter of prefill tokens for each tenant, the
virtual counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). A sequence begins at its
tenant's counter, which is called its turn, and the counter then grows by the tokens to be computed. A waiting sequence
goes before the prefill of another tenant if its counter is below the turn of that one. So prompts are not interleaved
without need: one that has begun is interrupted only by tenants that had less service when it began.

A tenant that begins to wait is lifted to nearly the highest turn, as in start-time fair queueing (Goyal, Vin and Cheng,
SIGCOMM 1996): idling earns no credit but `head_start_tokens`, with which it goes before what has begun. While two
tenants wait, what has been begun for them differs by no more than the head start and the longest prompt of each.

A counter is kept as long as it is above that of a newcomer, also when its tenant has nothing in the engine: one that
sends its prompts one by one would otherwise begin each as a newcomer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeVar

from kvloom_common.class_rank import INTERACTIVE_RANK
from shard_server.engines.queue_order import class_order

MAX_REMEMBERED_TENANTS: Final = 256
"""Those without sequences. Beyond it, those that are nearest to being newcomers are forgotten."""


class OrderedSequence(Protocol):
    """A sequence, as far as the order depends on it."""

    turn: int
    """Written when its prefill begins."""

    @property
    def class_rank(self) -> int: ...

    @property
    def tenant(self) -> str:
        """All sequences with "" count as those of one tenant."""
        ...

    @property
    def submit_time(self) -> float: ...

    @property
    def num_expected_prefill_tokens(self) -> int:
        """The tokens that its prefill will compute, as estimated before it begins."""
        ...


S = TypeVar("S", bound=OrderedSequence)


class PrefillOrder:
    """The tenants and classes of an engine's sequences. The engine tells it when each comes, begins and ends."""

    def __init__(self, head_start_tokens: int) -> None:
        """`head_start_tokens`: at least 1."""
        self._head_start_tokens = head_start_tokens
        self._counters: dict[str, int] = {}
        """Tenant → prefill tokens that were begun for it, relative to the others."""
        self._num_sequences: dict[str, int] = {}
        """Tenant → its sequences, waiting or running. Absent: it has none."""
        self._num_ranked = 0
        """Sequences of other classes than interactive ones."""
        self._highest_turn: int | None = None
        """None: none has begun since the engine was empty."""

    @property
    def is_mixed(self) -> bool:
        """True when there are sequences of several tenants, or of another class than interactive. Otherwise the order
        is that of arrival."""
        return self._num_ranked > 0 or len(self._num_sequences) > 1

    @property
    def has_tenants(self) -> bool:
        """True when there are sequences of several tenants."""
        return len(self._num_sequences) > 1

    def add(self, sequence: OrderedSequence) -> None:
        """A sequence has been submitted."""
        tenant = sequence.tenant
        least = self._newcomer
        self._counters[tenant] = max(self._counters.get(tenant, least), least)
        self._num_ranked += sequence.class_rank != INTERACTIVE_RANK
        self._num_sequences[tenant] = self._num_sequences.get(tenant, 0) + 1

    def begin(self, sequence: OrderedSequence, num_tokens: int) -> None:
        """Its prefill, of so many tokens, begins; again if it was preempted."""
        turn = sequence.turn = self._counters[sequence.tenant]
        self._counters[sequence.tenant] = turn + num_tokens
        self._highest_turn = turn if self._highest_turn is None else max(self._highest_turn, turn)

    def remove(self, sequence: OrderedSequence) -> None:
        """A sequence has ended, or was cancelled."""
        tenant = sequence.tenant
        self._num_ranked -= sequence.class_rank != INTERACTIVE_RANK
        num_left = self._num_sequences[tenant] - 1
        if num_left:
            self._num_sequences[tenant] = num_left
        else:
            del self._num_sequences[tenant]
            self._forget()

    def sort_waiting(self, waiting: Iterable[S], key: Callable[[S], float] | None = None) -> list[S]:
        """The order of admission. `key` orders the sequences of a tenant, and by default is their order of classes."""
        ordered = sorted(waiting, key=_class_order if key is None else key)
        if not self.has_tenants:
            return ordered
        counters = self._counters.copy()
        turns: list[int] = []
        for sequence in ordered:
            turns.append(counters[sequence.tenant])
            counters[sequence.tenant] += sequence.num_expected_prefill_tokens
        return _by_turn(ordered, turns)

    def sort_begun(self, begun: Iterable[S]) -> list[S]:
        """The order in which prefill that has begun continues."""
        ordered = sorted(begun, key=_class_order)
        return _by_turn(ordered, [sequence.turn for sequence in ordered]) if self.has_tenants else ordered

    def goes_before(self, waiting: OrderedSequence, begun: OrderedSequence) -> bool:
        """True when prefill that has begun gives way to a waiting sequence."""
        if waiting.class_rank != begun.class_rank:
            return waiting.class_rank < begun.class_rank and _class_order(waiting) < _class_order(begun)
        return waiting.tenant != begun.tenant and self._counters[waiting.tenant] < begun.turn

    def check_integrity(self, sequences: Iterable[OrderedSequence]) -> None:
        """Raise AssertionError unless these are all sequences, and little is kept of other tenants."""
        num_ranked, num_of_tenants = 0, dict.fromkeys(self._num_sequences, 0)
        for sequence in sequences:
            num_ranked += sequence.class_rank != INTERACTIVE_RANK
            num_of_tenants[sequence.tenant] += 1
        assert self._num_ranked == num_ranked, "ranks are counted wrongly"
        assert self._num_sequences == num_of_tenants, "the sequences of tenants are counted wrongly"
        assert self._num_sequences.keys() <= self._counters.keys(), "a tenant has no counter"
        assert len(self._counters) <= len(self._num_sequences) + MAX_REMEMBERED_TENANTS, "too much is kept"

    @property
    def _newcomer(self) -> int:
        """The counter to which a tenant is lifted."""
        return 0 if self._highest_turn is None else self._highest_turn - self._head_start_tokens

    def _forget(self) -> None:
        """Drop the counters that make no difference any more."""
        if not self._num_sequences:
            self._counters.clear()
            self._highest_turn = None
            return
        counters = self._counters
        absent = [tenant for tenant in counters if tenant not in self._num_sequences]
        absent.sort(key=counters.__getitem__)
        num_beyond = len(absent) - MAX_REMEMBERED_TENANTS
        for position, tenant in enumerate(absent):
            if position < num_beyond or counters[tenant] <= self._newcomer:
                del counters[tenant]


def _class_order(sequence: OrderedSequence) -> float:
    return class_order(sequence.class_rank, sequence.submit_time)


def _by_turn(ordered: list[S], turns: list[int]) -> list[S]:
    """Within each class, the lowest turn first; the places that a class has among the others stay as they are."""
    positions = sorted(range(len(ordered)), key=turns.__getitem__)
    of_class: dict[int, list[S]] = {}
    for position in reversed(positions):
        of_class.setdefault(ordered[position].class_rank, []).append(ordered[position])
    return [of_class[sequence.class_rank].pop() for sequence in ordered]
