"""The queues of requests in the router: one per shard for requests that will be sent there once it has little enough
queued, one per model for requests that no shard had room for, and one per model and class for requests that are not
placed while more urgent ones wait. In every queue the most urgent class goes first, and within it the tenant that has
had least service."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from router.core.dispatch.flow_order import FlowOrder
from router.core.dispatch.service_counters import Flow, ServiceCounters
from router.core.live import LiveRequest, QueueId
from router.core.priority_classes import INTERACTIVE


class _Queue:
    """The requests of one queue."""

    __slots__ = ("flows", "num_requests", "order")

    def __init__(self) -> None:
        self.flows: dict[Flow, dict[str, LiveRequest]] = {}
        """Flow → request_id → request. No flow is empty."""
        self.num_requests = 0
        self.order: FlowOrder | None = None
        """None: there has been only one flow."""

    def note_head(self, flow: Flow, model: str, service: ServiceCounters) -> None:
        """The first request of the flow is another one than before, or none."""
        flows = self.flows
        if self.order is None:
            if len(flows) > 1:
                self.order = FlowOrder(model, service)
                for each, requests in flows.items():
                    self.order.set_head(each, next(iter(requests.values())))
        elif flow in flows:
            self.order.set_head(flow, next(iter(flows[flow].values())))
        else:
            self.order.remove(flow)


class WaitingQueues:
    """First in, first out within a flow, unless `take` gets an urgency."""

    def __init__(self, service: ServiceCounters | None = None) -> None:
        self.service = service or ServiceCounters()
        self._queues: dict[QueueId, _Queue] = {}
        """No queue is empty."""
        self.without_shard: dict[QueueId, None] = {}
        """Those that are of no shard: events ask for them, and a fleet has many that are."""
        self.num_requests = 0
        self.num_with_objectives = 0
        self._num_begun = 0
        self._num_of_tenant: dict[str, int] = {}
        self._num_waiting: dict[tuple[str, int], int] = {}

    def __len__(self) -> int:
        return self.num_requests

    def __iter__(self) -> Iterator[LiveRequest]:
        for queue_id in self._queues:
            yield from self.queue(queue_id)

    def __contains__(self, queue_id: QueueId) -> bool:
        return queue_id in self._queues

    @property
    def num_untouched(self) -> int:
        """The number of requests for which nothing has been computed yet."""
        return self.num_requests - self._num_begun

    def num_waiting(self, model: str, max_rank: int | None = None) -> int:
        """The number of waiting requests whose class has this rank or a more urgent one; None: of all."""
        counts = self._num_waiting
        if not counts:
            return 0
        return sum(
            count for (name, rank), count in counts.items() if name == model and (max_rank is None or rank <= max_rank)
        )

    def num_ahead(self, model: str, rank: int, tenant: str) -> int:
        """How many waiting requests go at most before one of the tenant that arrives now: all of more urgent classes,
        and those of its own rank until its turn comes. Tenants take turns, so that each other one is served no more
        requests than it meanwhile, if theirs are about as large."""
        num_urgent = self.num_waiting(model, rank - 1)
        num_own = self._num_of_tenant.get(tenant, 0)
        num_others = len(self._num_of_tenant) - (tenant in self._num_of_tenant)
        num_in_turn = num_own + num_others * (num_own + 1)
        return num_urgent + min(self.num_waiting(model, rank) - num_urgent, num_in_turn)

    def num_placed(self, model: str, rank: int) -> int:
        """The number of requests of classes of this rank that wait and are not parked."""
        num_waiting = self._num_waiting.get((model, rank), 0)
        if not num_waiting:
            return 0
        parked = (queue_id for queue_id in self._queues if queue_id.parked_class and queue_id.model == model)
        return num_waiting - sum(self.num_in(queue_id) for queue_id in parked if self.rank_of(queue_id) == rank)

    def rank_of(self, queue_id: QueueId) -> int:
        """The rank of the class whose requests are parked there."""
        return next(self.queue(queue_id)).priority_class.rank

    def has_tenant(self, tenant: str) -> bool:
        """True when a request of the tenant waits."""
        return tenant in self._num_of_tenant

    def counts(self) -> Mapping[tuple[str, int], int]:
        """By model and rank."""
        return self._num_waiting

    def num_in(self, queue_id: QueueId) -> int:
        queue = self._queues.get(queue_id)
        return 0 if queue is None else queue.num_requests

    def num_flows(self, queue_id: QueueId) -> int:
        queue = self._queues.get(queue_id)
        return 0 if queue is None else len(queue.flows)

    @property
    def queue_ids(self) -> list[QueueId]:
        return list(self._queues)

    def queue(self, queue_id: QueueId) -> Iterator[LiveRequest]:
        """Every request that waits there."""
        queue = self._queues.get(queue_id)
        if queue is not None:
            for requests in queue.flows.values():
                yield from requests.values()

    def push(self, request: LiveRequest, queue_id: QueueId) -> None:
        """Append the request; one that has already run goes to the head of its flow."""
        queue = self._queues.get(queue_id)
        if queue is None:
            queue = self._queues[queue_id] = _Queue()
            if not queue_id.shard_id:
                self.without_shard[queue_id] = None
        flows, flow = queue.flows, flow_of(request)
        requests = flows.setdefault(flow, {})
        if request.num_attempts:
            flows[flow] = {request.request.request_id: request, **requests}
            if self.service.is_counting:
                for choice in request.pending:
                    self.service.settle(choice)
        else:
            requests[request.request.request_id] = request
        queue.num_requests += 1
        request.queue_id = queue_id
        self.service.enter(request)
        if request.num_attempts or len(requests) == 1:
            queue.note_head(flow, queue_id.model, self.service)
        tenant = request.request.tenant
        self._num_of_tenant[tenant] = self._num_of_tenant.get(tenant, 0) + 1
        self.num_requests += 1
        self.num_with_objectives += request.objectives is not None
        self._num_begun += request.has_prefill
        key = (queue_id.model, request.priority_class.rank)
        self._num_waiting[key] = self._num_waiting.get(key, 0) + 1

    def remove(self, request: LiveRequest) -> None:
        queue_id, flow = request.queue_id, flow_of(request)
        assert queue_id is not None
        queue = self._queues[queue_id]
        flows = queue.flows
        requests = flows[flow]
        is_head = next(iter(requests.values())) is request
        del requests[request.request.request_id]
        queue.num_requests -= 1
        if not requests:
            del flows[flow]
            if not flows:
                del self._queues[queue_id]
                self.without_shard.pop(queue_id, None)
        request.queue_id = None
        self.service.leave(request)
        if is_head:
            queue.note_head(flow, queue_id.model, self.service)
        tenant = request.request.tenant
        self._num_of_tenant[tenant] -= 1
        if not self._num_of_tenant[tenant]:
            del self._num_of_tenant[tenant]
        self.num_requests -= 1
        self.num_with_objectives -= request.objectives is not None
        self._num_begun -= request.has_prefill
        key = (queue_id.model, request.priority_class.rank)
        self._num_waiting[key] -= 1
        if not self._num_waiting[key]:
            del self._num_waiting[key]

    def take(
        self,
        queue_id: QueueId,
        can_run: Callable[[LiveRequest], bool],
        urgency: Callable[[LiveRequest], float | tuple[float, float]] | None = None,
        has_turn: Callable[[LiveRequest], bool] = lambda _: True,
        now: float = 0.0,
    ) -> LiveRequest | None:
        """Remove and return the next request that can run now: of the first flow that has one, the most urgent (lowest
        value; without `urgency`: the first). The first request without `has_turn` stops its flow: hundreds may wait,
        and every event of the fleet asks for the next one."""
        for requests in self._in_order(queue_id, now):
            able = (request for request in itertools.takewhile(has_turn, requests.values()) if can_run(request))
            request = next(able, None) if urgency is None else min(able, key=urgency, default=None)
            if request is not None:
                self.remove(request)
                return request
        return None

    def _in_order(self, queue_id: QueueId, now: float) -> Iterable[Mapping[str, LiveRequest]]:
        """The requests of each flow, the next flow first."""
        queue = self._queues.get(queue_id)
        if queue is None:
            return ()
        flows = queue.flows
        return flows.values() if queue.order is None else map(flows.__getitem__, queue.order.in_order(now))

    def take_victim(self, tenant: str, rank: int = INTERACTIVE.rank) -> LiveRequest | None:
        """Make room for one more request: remove, from the least urgent rank that waits, the youngest request of the
        tenant with most requests waiting. If that rank is `rank`, only for a tenant that is below its share, by more
        than one."""
        lowest = max((request.priority_class.rank for request in self if not request.has_prefill), default=rank)
        if lowest < rank:
            return None
        waiting: dict[str, list[LiveRequest]] = {}
        for request in self:
            if request.priority_class.rank == lowest and not request.has_prefill:
                waiting.setdefault(request.request.tenant, []).append(request)
        longest = max(waiting, key=lambda name: len(waiting[name]), default="")
        if lowest == rank and len(waiting.get(longest, ())) <= len(waiting.get(tenant, ())) + 1:
            return None
        victim = max(reversed(waiting[longest]), key=lambda request: request.arrived_at)
        return None if victim.num_attempts else victim


def flow_of(live: LiveRequest) -> Flow:
    request = live.request
    return Flow(live.priority_class.name, request.tenant, request.fairness_id)
