"""Requests that wait for a shard with room: per model, tenants take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from router.core.live import LiveRequest


class FairQueue:
    """First in, first out within a tenant; tenants of a model are served in turns."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, dict[str, LiveRequest]]] = {}
        """Model → tenant → request_id → request. Tenants lie in the order of their turns."""
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[LiveRequest]:
        for tenants in self._models.values():
            for requests in tenants.values():
                yield from requests.values()

    @property
    def models(self) -> list[str]:
        return list(self._models)

    def push(self, request: LiveRequest) -> None:
        """At the end; one that has already run goes to the head of its tenant's line."""
        tenants = self._models.setdefault(request.request.model, {})
        requests = tenants.setdefault(request.request.tenant, {})
        if request.num_attempts:
            tenants[request.request.tenant] = {request.request.request_id: request, **requests}
        else:
            requests[request.request.request_id] = request
        request.is_queued = True
        self._num_requests += 1

    def remove(self, request: LiveRequest) -> None:
        model, tenant = request.request.model, request.request.tenant
        tenants = self._models[model]
        del tenants[tenant][request.request.request_id]
        if not tenants[tenant]:
            del tenants[tenant]
            if not tenants:
                del self._models[model]
        request.is_queued = False
        self._num_requests -= 1

    def pop_first(self, model: str, can_run: Callable[[LiveRequest], bool]) -> LiveRequest | None:
        """The next request of `model` that can run now; its tenant's next turn comes after everybody else's."""
        tenants = self._models.get(model, {})
        for tenant, requests in tenants.items():
            for request in requests.values():
                if can_run(request):
                    self.remove(request)
                    if tenant in tenants:
                        tenants[tenant] = tenants.pop(tenant)
                    return request
        return None

    def take_victim(self, tenant: str) -> LiveRequest | None:
        """Make place in a full queue for a tenant that has less than its share: the youngest request of the tenant that
        has most in the queue, if that is more than one request above `tenant`'s own."""
        lengths: dict[str, int] = {}
        for tenants in self._models.values():
            for name, requests in tenants.items():
                lengths[name] = lengths.get(name, 0) + len(requests)
        longest = max(lengths, key=lambda name: lengths[name], default="")
        if lengths.get(longest, 0) <= lengths.get(tenant, 0) + 1:
            return None
        lines = [tenants[longest] for tenants in self._models.values() if longest in tenants]
        victim = max((next(reversed(line.values())) for line in lines), key=lambda request: request.arrived_at)
        return None if victim.num_attempts else victim
