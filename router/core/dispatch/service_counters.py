"""Decides which tenant is served next: the one that has had least service, counted in tokens.

Every tenant has a virtual counter. It advances by the prompt tokens that are computed for the tenant, when a request is
dispatched, and by its output tokens, which weigh more. The next request of a queue is one of the tenant with the lowest
counter. A tenant that begins to wait is lifted to the lowest counter of those that wait already, so that idling earns
no credit. While two tenants have requests waiting, what they are served therefore differs by no more than a bound that
does not grow with time: twice the most that one tenant's running requests can still add. (Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024.)

Each model has three levels of such counters: of the classes, whose service is divided by their weights, of the tenants
in a class, and of the sub-flows of a tenant, which share what it gets.

Nothing is counted when a token passes. Output is counted from the lengths of the answers: when one ends or waits again,
and for those that run when a decision depends on it, at most once per SETTLE_SECONDS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from router.core.dispatch.counter_order import CounterOrder
from router.core.fleet.fleet import Shard
from router.core.live import Choice, LiveRequest
from router.core.priority_classes import PriorityClass

SETTLE_SECONDS: Final = 0.02
"""About an engine's step, in which every running sequence gets a token: counting more often would tell nothing."""
MAX_TENANTS: Final = 1024
"""Tenants of one class and model whose counters are kept, besides those that wait."""
MAX_SUB_FLOWS: Final = 64
"""The maximum number of sub-flows of one tenant."""
MAX_BOOKS: Final = 1024
"""Models, classes and tenants that have counters of their own below them."""


class Flow(NamedTuple):
    """Requests that are served one after another, in the order of their arrival."""

    priority_class: str
    tenant: str
    fairness_id: str
    """Divides the tenant's requests into sub-flows; "" unless the caller names one."""


class VirtualCounters:
    """The counters of one level. Names are kept while they wait; of the others, those with the highest counters: those
    with the lowest would be lifted anyway."""

    __slots__ = ("_last", "_max_kept", "_num_dispatches", "_num_waiting", "_service", "_turns", "_waiting")

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._service: dict[str, float] = {}
        self._num_waiting: dict[str, int] = {}
        """How many requests of each name wait; names without any are absent."""
        self._waiting = CounterOrder(self._service.__getitem__)
        """These names."""
        self._last = ""
        """The name whose request was dispatched, or left, last."""
        self._num_dispatches = 0
        self._turns: dict[str, int] = {}
        """The number of the last dispatch of each name."""

    def __len__(self) -> int:
        return len(self._service)

    def __contains__(self, name: str) -> bool:
        return name in self._service

    def __getitem__(self, name: str) -> float:
        return self._service.get(name, 0.0)

    def order(self, name: str) -> tuple[float, int]:
        """The name with the lowest value is next. Of those with equal service, that is the one that was dispatched
        longest ago: one that gives up waiting and returns keeps its turn."""
        return self._service.get(name, 0.0), self._turns.get(name, 0)

    @property
    def is_idle(self) -> bool:
        return not self._num_waiting

    def enter(self, name: str) -> None:
        """A request begins to wait."""
        num_waiting = self._num_waiting.get(name, 0)
        if not num_waiting:
            self._lift(name)
            self._waiting.add(name)
        self._num_waiting[name] = num_waiting + 1

    def leave(self, name: str) -> None:
        """A request waits no longer."""
        num_waiting = self._num_waiting.get(name, 0)
        if num_waiting > 1:
            self._num_waiting[name] = num_waiting - 1
        elif num_waiting:
            del self._num_waiting[name]
            self._waiting.discard(name)
        self._last = name

    def dispatch(self, name: str) -> None:
        """A request is dispatched, which may not have waited."""
        if name not in self._num_waiting:
            self._lift(name)
        self._last = name
        self._num_dispatches += 1
        self._turns[name] = self._num_dispatches

    def charge(self, name: str, service: float) -> None:
        self._service[name] = self._service.get(name, 0.0) + service

    def _lift(self, name: str) -> None:
        """Idling earns no credit: the name starts with the lowest counter among those that wait, or if none does, with
        that of the last one that was served."""
        service, first = self._service, self._waiting.first()
        least = service.get(self._last, 0.0) if first is None else service[first]
        service[name] = max(service.get(name, 0.0), least)
        if len(service) - len(self._num_waiting) > self._max_kept:
            self._forget_some(but=name)

    def _forget_some(self, but: str) -> None:
        needed = {but, self._last}
        idle = [name for name in self._service if name not in self._num_waiting and name not in needed]
        for name in sorted(idle, key=self._service.__getitem__)[: 1 + self._max_kept // 8]:
            del self._service[name]
            self._turns.pop(name, None)


class ServiceCounters:
    """The counters of all models, classes, tenants and sub-flows."""

    def __init__(self, prompt_token_weight: float = 1.0, output_token_weight: float = 2.0) -> None:
        self._prompt_token_weight = prompt_token_weight
        self._output_token_weight = output_token_weight
        self._books: dict[tuple[str, ...], VirtualCounters] = {}
        """(model) → its classes; (model, class) → the tenants; (model, class, tenant) → the sub-flows, if the tenant
        has named any."""
        self._only: tuple[PriorityClass, str, str] | None = None
        """The class, tenant and sub-flow of all requests so far. Nothing is charged before there is another one."""
        self.is_counting = False
        """True once a second flow has asked for service."""
        self._settled_at: dict[str, float] = {}
        """By model: when the output of running answers was last counted."""

    def has_rivals(self, live: LiveRequest) -> bool:
        """True when any other class, tenant or sub-flow than that of this request has ever asked for service."""
        if self.is_counting:
            return True
        request = live.request
        flow = (live.priority_class, request.tenant, request.fairness_id)
        if flow == self._only:
            return False
        self.is_counting = self._only is not None
        self._only = flow
        return self.is_counting

    def enter(self, live: LiveRequest) -> None:
        """The request begins to wait."""
        self.has_rivals(live)
        for counters, name, _ in self._levels(live):
            counters.enter(name)

    def leave(self, live: LiveRequest) -> None:
        """The request waits no longer."""
        for counters, name, _ in self._levels(live):
            counters.leave(name)

    def note_first_dispatch(self, live: LiveRequest, num_prefill_tokens: int, now: float) -> None:
        """The first part of the request is on its way to a shard, which is to compute so many tokens of its prompt."""
        live.first_dispatched_at = now
        if self.has_rivals(live):
            self.note_dispatch(live, num_prefill_tokens)

    def note_dispatch(self, live: LiveRequest, num_prefill_tokens: int) -> None:
        """The same of a request that has rivals."""
        for counters, name, share in self._levels(live):
            counters.dispatch(name)
            counters.charge(name, share * self._prompt_token_weight * num_prefill_tokens)

    def settle(self, choice: Choice) -> None:
        """Count the output of a choice that has ended, or waits."""
        num_tokens = len(choice.output_token_ids) - choice.num_counted_tokens
        if num_tokens > 0:
            choice.num_counted_tokens += num_tokens
            self._charge_output(choice.request, num_tokens)

    def settle_shards(self, model: str, shards: Iterable[Shard], now: float) -> None:
        """Count what these shards have generated for choices that run there, unless that was just done."""
        if now - self._settled_at.get(model, -SETTLE_SECONDS) < SETTLE_SECONDS:
            return
        self._settled_at[model] = now
        num_tokens: Counter[LiveRequest] = Counter()
        for shard in shards:
            shard.fast_path.write_back()
            for choice in shard.choices.values():
                num_new = len(choice.output_token_ids) - choice.num_counted_tokens
                if num_new > 0:
                    choice.num_counted_tokens += num_new
                    num_tokens[choice.request] += num_new
        for live, num_new in num_tokens.items():
            self._charge_output(live, num_new)

    def order(self, key: tuple[str, ...], name: str) -> tuple[float, int]:
        """The name with the lowest value is next, of the classes of a model (key: the model), of the tenants of a class
        (model, class), or of the sub-flows of a tenant (model, class, tenant)."""
        book = self._books.get(key)
        return (0.0, 0) if book is None else book.order(name)

    def service(self, model: str, priority_class: str, tenant: str) -> float:
        """The tenant's virtual counter, in weighted tokens."""
        tenants = self._books.get((model, priority_class))
        return 0.0 if tenants is None else tenants[tenant]

    def _charge_output(self, live: LiveRequest, num_tokens: int) -> None:
        for counters, name, share in self._levels(live):
            counters.charge(name, share * self._output_token_weight * num_tokens)

    def _levels(self, live: LiveRequest) -> list[tuple[VirtualCounters, str, float]]:
        """The counters of the request at each level: with its name there, and how much a unit of service counts."""
        request, class_name = live.request, live.priority_class.name
        model, tenant, fairness_id = request.model, request.tenant, request.fairness_id
        levels = [
            (self._book(model), class_name, 1.0 / live.priority_class.weight),
            (self._book(model, class_name), tenant, 1.0),
        ]
        if fairness_id or (model, class_name, tenant) in self._books:
            levels.append((self._book(model, class_name, tenant), fairness_id, 1.0))
        return levels

    def _book(self, *key: str) -> VirtualCounters:
        book = self._books.get(key)
        if book is None:
            if len(self._books) >= MAX_BOOKS:
                self._forget_books()
            book = self._books[key] = VirtualCounters(MAX_SUB_FLOWS if len(key) > 2 else MAX_TENANTS)
        return book

    def _forget_books(self) -> None:
        """Forget the oldest books of which nothing waits."""
        idle = [key for key, book in self._books.items() if book.is_idle]
        for key in idle[: MAX_BOOKS // 8]:
            del self._books[key]
            self._settled_at.pop(key[0], None)
