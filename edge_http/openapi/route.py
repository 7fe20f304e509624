"""A route: all that is said of one method of one path. Matching, scopes, CORS and /openapi.json derive from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from edge_http.edge import Edge
from kvloom_common.tenancy.scopes import Scope

Handler = Callable[[Edge, web.BaseRequest], Awaitable[web.StreamResponse]]

EVENT_STREAM = "text/event-stream"


@dataclasses.dataclass(frozen=True, slots=True)
class Success:
    """A response that is no error."""

    description: str
    body: Any = None
    """The type of the JSON body, or of an event's data; None: there is no JSON."""
    content_type: str = "application/json"
    status: int = 200
    headers: tuple[str, ...] = ()
    """Names of `parameters.RESPONSE_HEADERS`, besides those of every response."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path of the HTTP API, and what it is for."""

    path: str
    """A segment in braces stands for any."""
    method: str
    handler: Handler
    scope: Scope = "inference"
    """A key of a tenant needs this scope for it."""
    is_of_fabric: bool = False
    """It concerns all tenants, so that only administrators of the whole fabric may use it."""
    is_of_operators: bool = False
    """It is for administrators. In a fabric without tenants, only this machine may use it (operating/access.py)."""
    has_head: bool = True
    """A GET may also be sent as HEAD."""
    takes_slashes: bool = False
    """The segment in braces may have slashes, as names of models do."""
    id: str
    """The name for generated clients."""
    tag: str
    summary: str
    description: str = ""
    parameters: tuple[str, ...] = ()
    """Names of `parameters.PARAMETERS`. Those in the path are found by themselves."""
    body: Any = None
    """The type of the JSON body; None: there is none."""
    examples: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Bodies by their titles."""
    answers: tuple[Success, ...]
    errors: tuple[int, ...] = ()
    """The statuses of errors, besides those of every operation."""
    error: Any = None
    """The type of an error's body, if the API has a shape of its own; None: OpenAI's."""
    headers: tuple[str, ...] = ()
    """Names of `parameters.RESPONSE_HEADERS` that its answers and its errors may have."""
    is_open: bool = False
    """It needs no API key: the probes of load balancers, the description of the API, which holds no secrets, and the
    pages, which ask their users for a key."""

    @property
    def methods(self) -> Sequence[str]:
        """The methods that a request may have."""
        return ("GET", "HEAD") if self.method == "GET" and self.has_head else (self.method,)
