"""The route of an operation on stored objects."""

from __future__ import annotations

from typing import Any, Final

from edge_http.openapi.route import Route, Success
from edge_http.state.handler import operating
from edge_http.wire.headers import REQUEST_ID

_ERRORS: Final = (400, 404, 409, 413, 415, 429, 501, 503)
PAGE: Final = ("after", "limit", "order")


def state_route(method: str, path: str, name: str, tag: str, summary: str, answer: Any, **more: Any) -> Route:
    """The route of an operation of the orchestrator, whose id is its name."""
    body, parameters = more.pop("body", None), more.pop("parameters", ())
    handler = more.pop("handler", None) or operating(name, path, body)
    return Route(
        path=path,
        method=method,
        handler=handler,
        id=name,
        tag=tag,
        summary=summary,
        description="Needs an orchestrator (`kvloom up --orchestrator`).",
        answers=(Success("The object, or a page of them.", answer, more.pop("content_type", "application/json")),),
        errors=_ERRORS,
        body=body,
        parameters=(*parameters, REQUEST_ID),
        has_head=False,
        **more,
    )
