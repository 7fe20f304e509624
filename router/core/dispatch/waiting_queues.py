"""The queues of requests in the router: one per shard for requests that will be sent there once it has little enough
queued, and one per model for requests that no shard had room for. In every queue tenants take turns. A tenant whose
requests have all left before its turn (timed out, cancelled) keeps its place until then, so that a retry does not start
at the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from router.core.events import Tier
from router.core.live import LiveRequest, QueueId

MAX_TENANTS: Final = 1024
"""In a queue with more tenants, no places are kept for those that have left."""


class WaitingQueues:
    """First in, first out within a tenant, unless `take` gets an urgency."""

    def __init__(self) -> None:
        self._queues: dict[QueueId, dict[str, dict[str, LiveRequest]]] = {}
        """Queue → tenant → request_id → request. Tenants are in the order of their turns, including those that have
        left; no queue is empty."""
        self.num_requests = 0
        self._num_begun = 0
        self._num_waiting: dict[tuple[str, Tier], int] = {}

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

    def num_waiting(self, model: str, tier: Tier | None = None) -> int:
        """The number of waiting requests of one tier, or of all."""
        counts = self._num_waiting
        if not counts:
            return 0
        if tier is not None:
            return counts.get((model, tier), 0)
        num_urgent = counts.get((model, Tier.INTERACTIVE), 0)
        return num_urgent + counts.get((model, Tier.BATCH), 0) + counts.get((model, Tier.SHADOW), 0)

    def has_tenant(self, tenant: str) -> bool:
        """Whether a request of the tenant waits."""
        return any(tenants.get(tenant) for tenants in self._queues.values())

    def counts(self) -> Mapping[tuple[str, Tier], int]:
        """By model and tier."""
        return self._num_waiting

    def num_in(self, queue_id: QueueId) -> int:
        return sum(map(len, self._queues.get(queue_id, {}).values()))

    @property
    def queue_ids(self) -> list[QueueId]:
        return list(self._queues)

    def queue(self, queue_id: QueueId) -> Iterator[LiveRequest]:
        """Every request that waits there."""
        for requests in self._queues.get(queue_id, {}).values():
            yield from requests.values()

    def push(self, request: LiveRequest, queue_id: QueueId) -> None:
        """Append the request; one that has already run goes to the head of its tenant's part."""
        tenants = self._queues.setdefault(queue_id, {})
        requests = tenants.setdefault(request.request.tenant, {})
        if request.num_attempts:
            tenants[request.request.tenant] = {request.request.request_id: request, **requests}
        else:
            requests[request.request.request_id] = request
        request.queue_id = queue_id
        self.num_requests += 1
        self._num_begun += request.has_prefill_chunks
        key = (queue_id.model, request.request.tier)
        self._num_waiting[key] = self._num_waiting.get(key, 0) + 1

    def remove(self, request: LiveRequest) -> None:
        queue_id, tenant = request.queue_id, request.request.tenant
        assert queue_id is not None
        tenants = self._queues[queue_id]
        requests = tenants[tenant]
        del requests[request.request.request_id]
        if not requests:
            if not any(tenants.values()):
                del self._queues[queue_id]
            elif len(tenants) > MAX_TENANTS:
                del tenants[tenant]
        request.queue_id = None
        self.num_requests -= 1
        self._num_begun -= request.has_prefill_chunks
        key = (queue_id.model, request.request.tier)
        self._num_waiting[key] -= 1
        if not self._num_waiting[key]:
            del self._num_waiting[key]

    def take(
        self,
        queue_id: QueueId,
        can_run: Callable[[LiveRequest], bool],
        urgency: Callable[[LiveRequest], float] | None = None,
        has_turn: Callable[[LiveRequest], bool] = lambda _: True,
    ) -> LiveRequest | None:
        """Remove and return the next request that can run now: for the first tenant that has one, its most urgent
        (lowest value; without `urgency`: its first). The tenant's next turn comes after all others. The first request
        without `has_turn` stops its tenant: hundreds may wait, and every event of the fleet asks for the next one."""
        tenants = self._queues.get(queue_id, {})
        absent: list[str] = []
        for tenant, requests in tenants.items():
            able = (request for request in itertools.takewhile(has_turn, requests.values()) if can_run(request))
            request = next(able, None) if urgency is None else min(able, key=urgency, default=None)
            if request is not None:
                self.remove(request)
                for name in (*absent, tenant):  # their turns have come
                    waiting = tenants.pop(name, None)
                    if waiting:
                        tenants[name] = waiting
                return request
            if not requests:
                absent.append(tenant)
        return None

    def take_victim(self, tenant: str, tier: Tier = Tier.INTERACTIVE) -> LiveRequest | None:
        """Make room for one more request: remove, from the least urgent waiting tier, the youngest request of the
        tenant with most requests waiting. If that tier is `tier`, only for a tenant that is below its share, by more
        than one."""
        lowest = max((request.request.tier for request in self if not request.has_prefill_chunks), default=tier)
        if lowest < tier:
            return None
        waiting: dict[str, list[LiveRequest]] = {}
        for request in self:
            if request.request.tier == lowest and not request.has_prefill_chunks:
                waiting.setdefault(request.request.tenant, []).append(request)
        longest = max(waiting, key=lambda name: len(waiting[name]), default="")
        if lowest == tier and len(waiting.get(longest, ())) <= len(waiting.get(tenant, ())) + 1:
            return None
        victim = max(reversed(waiting[longest]), key=lambda request: request.arrived_at)
        return None if victim.num_attempts else victim
