"""The queues of requests in the router: one per shard for requests that will be sent there once it has little enough
queued, one per model for requests that no shard had room for, and one per model and class for requests that are not
placed while more urgent ones wait. In every queue the most urgent class goes first, and within it the tenant that has
had least service."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from router.core.dispatch.service_counters import Flow, ServiceCounters
from router.core.live import LiveRequest, QueueId
from router.core.priority_classes import INTERACTIVE


class WaitingQueues:
    """First in, first out within a flow, unless `take` gets an urgency."""

    def __init__(self, service: ServiceCounters | None = None) -> None:
        self.service = service or ServiceCounters()
        self._queues: dict[QueueId, dict[Flow, dict[str, LiveRequest]]] = {}
        """Queue → flow → request_id → request. No queue and no flow is empty."""
        self.num_requests = 0
        self.num_with_objectives = 0
        self._num_begun = 0
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
        """Whether a request of the tenant waits."""
        return any(flow.tenant == tenant for flows in self._queues.values() for flow in flows)

    def counts(self) -> Mapping[tuple[str, int], int]:
        """By model and rank."""
        return self._num_waiting

    def num_in(self, queue_id: QueueId) -> int:
        return sum(map(len, self._queues.get(queue_id, {}).values()))

    def num_flows(self, queue_id: QueueId) -> int:
        return len(self._queues.get(queue_id, ()))

    @property
    def queue_ids(self) -> list[QueueId]:
        return list(self._queues)

    def queue(self, queue_id: QueueId) -> Iterator[LiveRequest]:
        """Every request that waits there."""
        for requests in self._queues.get(queue_id, {}).values():
            yield from requests.values()

    def push(self, request: LiveRequest, queue_id: QueueId) -> None:
        """Append the request; one that has already run goes to the head of its flow."""
        flows = self._queues.setdefault(queue_id, {})
        flow = flow_of(request)
        requests = flows.setdefault(flow, {})
        if request.num_attempts:
            flows[flow] = {request.request.request_id: request, **requests}
            if self.service.is_counting:
                for choice in request.pending:
                    self.service.settle(choice)
        else:
            requests[request.request.request_id] = request
        request.queue_id = queue_id
        self.service.enter(request)
        self.num_requests += 1
        self.num_with_objectives += request.objectives is not None
        self._num_begun += request.has_prefill_chunks
        key = (queue_id.model, request.priority_class.rank)
        self._num_waiting[key] = self._num_waiting.get(key, 0) + 1

    def remove(self, request: LiveRequest) -> None:
        queue_id, flow = request.queue_id, flow_of(request)
        assert queue_id is not None
        flows = self._queues[queue_id]
        requests = flows[flow]
        del requests[request.request.request_id]
        if not requests:
            del flows[flow]
            if not flows:
                del self._queues[queue_id]
        request.queue_id = None
        self.service.leave(request)
        self.num_requests -= 1
        self.num_with_objectives -= request.objectives is not None
        self._num_begun -= request.has_prefill_chunks
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
        """The requests of each flow, the next flow first: by rank, then by the service of class, tenant and sub-flow,
        then in the order in which the flows began to wait. Waiting makes no flow more urgent than the most urgent class
        that waits in the queue, with which it then shares the shards by weight."""
        flows = self._queues.get(queue_id, {})
        if len(flows) < 2:
            yield from flows.values()
            return
        heads = [next(iter(requests.values())) for requests in flows.values()]
        most_urgent = min(head.priority_class.rank for head in heads)
        order = self.service.order
        heap = [
            (max(most_urgent, head.rank(now)), order(queue_id.model, flow), number, flow)
            for number, (flow, head) in enumerate(zip(flows, heads, strict=True))
        ]
        heapq.heapify(heap)
        while heap:
            yield flows[heapq.heappop(heap)[-1]]

    def take_victim(self, tenant: str, rank: int = INTERACTIVE.rank) -> LiveRequest | None:
        """Make room for one more request: remove, from the least urgent rank that waits, the youngest request of the
        tenant with most requests waiting. If that rank is `rank`, only for a tenant that is below its share, by more
        than one."""
        lowest = max((request.priority_class.rank for request in self if not request.has_prefill_chunks), default=rank)
        if lowest < rank:
            return None
        waiting: dict[str, list[LiveRequest]] = {}
        for request in self:
            if request.priority_class.rank == lowest and not request.has_prefill_chunks:
                waiting.setdefault(request.request.tenant, []).append(request)
        longest = max(waiting, key=lambda name: len(waiting[name]), default="")
        if lowest == rank and len(waiting.get(longest, ())) <= len(waiting.get(tenant, ())) + 1:
            return None
        victim = max(reversed(waiting[longest]), key=lambda request: request.arrived_at)
        return None if victim.num_attempts else victim


def flow_of(live: LiveRequest) -> Flow:
    request = live.request
    return Flow(live.priority_class.name, request.tenant, request.fairness_id)
