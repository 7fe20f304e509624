"""The request that a task works for, so that every log line of the task names it.

A request has up to four names in a log line; those that are empty are left out:

    request_id         the fabric's id of the request, which is the id of its response
    client_request_id  the id that the caller gave it (x-request-id)
    traceparent        the W3C trace context that the caller sent
    tenant             the caller's account

The edge has a task for each request and calls `enter_request` in it. The router and the shards handle requests in
callbacks that serve many requests; their log calls pass `request_fields` instead.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any, Final, Protocol


class RequestContext(Protocol):
    def log_fields(self) -> Mapping[str, str]:
        """The names of the request, those that are known."""
        ...


_current: Final[ContextVar[RequestContext | None]] = ContextVar("request", default=None)


def enter_request(context: RequestContext) -> None:
    """From now on this task, and tasks that it starts, work for this request."""
    _current.set(context)


def current_request() -> RequestContext | None:
    return _current.get()


def request_fields(
    request_id: str = "", client_request_id: str = "", traceparent: str = "", tenant: str = ""
) -> dict[str, str]:
    """The names of a request that are not empty, as arguments of a log call."""
    fields = {"request_id": request_id} if request_id else {}
    if client_request_id and client_request_id != request_id:
        fields["client_request_id"] = client_request_id
    if traceparent:
        fields["traceparent"] = traceparent
    if tenant:
        fields["tenant"] = tenant
    return fields


def add_request_fields(_logger: object, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor of structlog: adds the names of the task's request to a line that does not have them."""
    context = _current.get()
    if context is not None and "client_request_id" not in event:  # a line that has it has them all
        for key, value in context.log_fields().items():
            event.setdefault(key, value)
    return event
