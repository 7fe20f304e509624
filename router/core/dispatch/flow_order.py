"""Orders the flows of a queue: by rank, then by the service of its class, tenant and sub-flow."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator
from typing import Any

from router.core.dispatch.counter_order import CounterOrder
from router.core.dispatch.service_counters import Flow, ServiceCounters
from router.core.live import LiveRequest


class FlowOrder:
    """The flows of one queue, by the requests at their heads. Kept while requests come and go, so that the next flow
    costs little to find however many wait."""

    def __init__(self, model: str, service: ServiceCounters) -> None:
        self._model = model
        self._service = service
        self._heads: dict[Flow, LiveRequest] = {}
        self._groups: dict[tuple[str, int], _Group] = {}
        """(class, rank) → its flows. A flow leaves the group of its class for that of a more urgent rank."""
        self._ranks: dict[Flow, int] = {}
        """The group in which each flow is."""
        self._unranked: dict[Flow, None] = {}
        """Flows with a new head, or that have waited long enough for another rank."""
        self._num_of_rank: dict[int, int] = {}
        """How many flows there are of classes of each rank."""
        self._older_at: dict[Flow, float] = {}
        """When the head will have waited for long enough to count as more urgent; without flows that never will."""
        self._aging = CounterOrder(self._older_at.__getitem__)

    def set_head(self, flow: Flow, head: LiveRequest) -> None:
        """This request is the first of its flow now."""
        if flow not in self._heads:
            rank = head.priority_class.rank
            self._num_of_rank[rank] = self._num_of_rank.get(rank, 0) + 1
        self._heads[flow] = head
        self._unranked[flow] = None

    def remove(self, flow: Flow) -> None:
        """Nothing of the flow waits any more."""
        rank = self._heads.pop(flow).priority_class.rank
        self._num_of_rank[rank] -= 1
        if not self._num_of_rank[rank]:
            del self._num_of_rank[rank]
        self._unranked.pop(flow, None)
        self._leave_group(flow)
        if self._older_at.pop(flow, None) is not None:
            self._aging.discard(flow)

    def in_order(self, now: float) -> Iterator[Flow]:
        """The next flow first. Flows with equal service are in the order in which they began to wait. Waiting makes
        none more urgent than the most urgent class that waits here, with which it then shares the shards by weight."""
        self._rank(now)
        if len(self._groups) == 1:
            yield from next(iter(self._groups.values())).in_order()
            return
        most_urgent = min(self._num_of_rank)
        together: dict[int, dict[str, list[_Group]]] = {}
        for (name, rank), group in self._groups.items():
            together.setdefault(max(most_urgent, rank), {}).setdefault(name, []).append(group)
        for _, classes in sorted(together.items()):
            for name in sorted(classes, key=lambda name: self._service.order((self._model,), name)):
                groups = classes[name]
                if len(groups) == 1:
                    yield from groups[0].in_order()
                else:
                    yield from heapq.merge(*(group.in_order() for group in groups), key=self._order_in_class)

    def _order_in_class(self, flow: Flow) -> Any:
        key = (self._model, flow.priority_class)
        return self._service.order(key, flow.tenant), self._service.order((*key, flow.tenant), flow.fairness_id)

    def _rank(self, now: float) -> None:
        """Put every flow into the group of the rank that its head has now."""
        while (flow := self._aging.first()) is not None and self._older_at[flow] <= now:
            self._aging.discard(flow)
            del self._older_at[flow]
            self._unranked[flow] = None
        for flow in self._unranked:
            head = self._heads[flow]
            rank = max(0, head.rank(now))
            if self._ranks.get(flow) != rank:
                self._leave_group(flow)
                self._join_group(flow, rank)
            if self._older_at.pop(flow, None) is not None:
                self._aging.discard(flow)
            aging_seconds = head.priority_class.aging_seconds
            if aging_seconds and rank:
                num_spans = int((now - head.arrived_at) / aging_seconds) + 1
                self._older_at[flow] = head.arrived_at + num_spans * aging_seconds
                self._aging.add(flow)
        self._unranked.clear()

    def _join_group(self, flow: Flow, rank: int) -> None:
        key = (flow.priority_class, rank)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(self._model, flow.priority_class, self._service)
        group.add(flow)
        self._ranks[flow] = rank

    def _leave_group(self, flow: Flow) -> None:
        rank = self._ranks.pop(flow, None)
        if rank is not None:
            key = (flow.priority_class, rank)
            self._groups[key].remove(flow)
            if not len(self._groups[key]):
                del self._groups[key]


class _Group:
    """Flows of one class and rank."""

    __slots__ = ("_class_name", "_model", "_service", "_sub_flows", "_tenants")

    def __init__(self, model: str, class_name: str, service: ServiceCounters) -> None:
        self._model = model
        self._class_name = class_name
        self._service = service
        self._tenants = CounterOrder[str](functools.partial(service.order, (model, class_name)))
        self._sub_flows: dict[str, CounterOrder[str]] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def add(self, flow: Flow) -> None:
        tenant = flow.tenant
        sub_flows = self._sub_flows.get(tenant)
        if sub_flows is None:
            order = functools.partial(self._service.order, (self._model, self._class_name, tenant))
            sub_flows = self._sub_flows[tenant] = CounterOrder[str](order)
            self._tenants.add(tenant)
        sub_flows.add(flow.fairness_id)

    def remove(self, flow: Flow) -> None:
        sub_flows = self._sub_flows[flow.tenant]
        sub_flows.discard(flow.fairness_id)
        if not len(sub_flows):
            del self._sub_flows[flow.tenant]
            self._tenants.discard(flow.tenant)

    def in_order(self) -> Iterator[Flow]:
        for tenant in self._tenants.in_order():
            for fairness_id in self._sub_flows[tenant].in_order():
                yield Flow(self._class_name, tenant, fairness_id)
