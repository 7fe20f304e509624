"""The routing table, and the one place where every failure becomes an error of the API that was called."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

import structlog
from aiohttp import web

from edge_http.admin.handler import administer
from edge_http.admin.routes import BY_PATH as ADMIN_PATHS
from edge_http.admin.routes import PREFIX as ADMIN_PREFIX
from edge_http.admin.routes import template_of
from edge_http.edge import Edge
from edge_http.endpoints.not_served import refuse_operation, refuse_unserved
from edge_http.formatting.error_formats import ANTHROPIC_ERRORS
from edge_http.openapi.route import Handler, Route
from edge_http.operating.access import check_own_machine
from edge_http.server.api_docs import API_ROUTES
from edge_http.state.handler import orchestrator_of
from edge_http.state.routes import STATE_ROUTES
from edge_http.wire.headers import (
    ANTHROPIC_REQUEST_ID,
    check_head,
    is_anthropic,
    request_id,
)
from edge_http.wire.json_response import error_response
from edge_http.wire.request_callers import Check
from edge_http.wire.request_record import CLIENT_CLOSED_REQUEST, RequestRecord
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.process.request_context import enter_request
from kvloom_common.tenancy.scopes import Scope

log = structlog.get_logger()


MAX_NAMED_MODELS: Final = 16
UNKNOWN_ROUTE: Final = "unknown"
_NO_IDS: Final = frozenset(("batches",))
"""These stand in the place of an id in paths of these APIs that are not served."""

_ID: Final = re.compile(r"\{\w+\}")
HANDLERS: Final[Mapping[str, Mapping[str, Handler]]] = {
    **{
        path: {method: route.handler for route in API_ROUTES if route.path == path for method in route.methods}
        for path in dict.fromkeys(route.path for route in API_ROUTES)
    },
    **{path: dict.fromkeys(methods, administer) for path, methods in ADMIN_PATHS.items()},
}
"""Handlers by path and method."""
OPEN_PATHS: Final = frozenset(route.path for route in API_ROUTES if route.is_open)
_OF_OPERATORS: Final = frozenset(route.path for route in API_ROUTES if route.is_of_operators)
_STATE_PATHS: Final = frozenset(route.path for route in STATE_ROUTES) - {
    route.path for route in API_ROUTES if route not in STATE_ROUTES
}
_OF_FABRIC: Final = frozenset(route.path for route in API_ROUTES if route.is_of_fabric)
_SCOPES: Final[Mapping[str, Scope]] = {
    **{route.path: route.scope for route in API_ROUTES},
    **dict.fromkeys(ADMIN_PATHS, "admin"),
}
_BY_FOLDER: Final[Mapping[str, Mapping[str, Route]]] = {
    folder: {
        _ID.sub("{}", route.path.removeprefix(f"{folder}{{id}}").removeprefix("/")): route
        for route in API_ROUTES
        if route.path.startswith(f"{folder}{{id}}")
    }
    for folder in dict.fromkeys(route.path.partition("{id}")[0] for route in API_ROUTES if "{id}" in route.path)
}
"""The routes of paths with an id: by what stands before it, and by what stands behind it, where a second id is {}."""


class HttpRouter:
    """aiohttp calls this handler for every well-formed request."""

    def __init__(self, edge: Edge, check: Check | None = None) -> None:
        """`check` says who a caller is; None: as for everyone outside the fabric."""
        self._edge = edge
        self._check = check or edge.callers.check
        self._have_tenants = edge.callers.have_tenants
        self._max_header_bytes = edge.config.max_header_bytes

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        edge = self._edge
        route = route_of(request)
        if edge.tracing is None or route in OPEN_PATHS:  # probes and pages would fill the collector
            record = RequestRecord(request, edge.callers, edge.cors)
        else:
            record = edge.tracing.new_record(request, route, edge.callers, edge.cors)
        enter_request(record)
        try:
            response = await self._answer(request, route, record)
        except BaseException:  # the client has disconnected
            record.log_end(edge.access_log, route, CLIENT_CLOSED_REQUEST, 0)
            record.end(CLIENT_CLOSED_REQUEST)
            raise
        edge.metrics.on_response(route, response.status)
        if not isinstance(response, web.Response):  # a stream, whose head has been sent already
            if edge.access_log.is_on:
                record.log_end(edge.access_log, route, response.status, None)
            record.end(response.status)
            return response
        if edge.admission.draining:
            response.force_close()
        if edge.access_log.is_on:
            record.log_end(edge.access_log, route, response.status, response.content_length)
        return response

    async def _answer(self, request: web.BaseRequest, route: str, record: RequestRecord) -> web.StreamResponse:
        edge = self._edge
        try:
            cors = edge.cors
            if cors is not None and (response := cors.preflight(request, _methods(route))) is not None:
                return response
            if route not in OPEN_PATHS:
                if (verification := self._check(request)) is not None:
                    await verification
                if self._have_tenants:
                    edge.callers.check_scope(request, _SCOPES.get(route, "inference"))
                    if route in _OF_FABRIC:
                        edge.callers.check_operator(request)
                elif route in _OF_OPERATORS:
                    check_own_machine(request)
            check_head(request)
            _check_header_size(request, self._max_header_bytes)
            return await _handler(request, route)(edge, request)
        except KvloomError as error:
            if error.reason == ErrorReason.ERROR_REASON_MODEL_NOT_FOUND and error.message.endswith("does not exist."):
                error = self._with_models(request, error)
            record.error_type = error.reason_name.lower()
            response = _error_response(request, error)
            if error.reason == ErrorReason.ERROR_REASON_METHOD_NOT_ALLOWED:
                response.headers["Allow"] = ", ".join(HANDLERS[route])
            if error.kind.http_status >= 500:
                log.info("request_failed", route=route, reason=error.reason_name)
            return response
        except ConnectionError:
            raise  # the client has disconnected
        except Exception:
            record.error_type = "internal"
            log.exception("request_broke", route=route)
            return _error_response(
                request, KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "Something went wrong on our side.")
            )

    def _with_models(self, request: web.BaseRequest, error: KvloomError) -> KvloomError:
        """The error, with the models that the caller may use instead."""
        names = sorted({model.name for model in self._edge.models.by_name.values() if model.adapter is None})
        usable = [name for name in names if name in set(self._edge.models.usable(request, names))]
        if not usable:
            return error
        more = ", ..." if len(usable) > MAX_NAMED_MODELS else ""
        return error.renamed(error.field, f"{error.message} Served are: {', '.join(usable[:MAX_NAMED_MODELS])}{more}.")


def _error_response(request: web.BaseRequest, error: KvloomError) -> web.Response:
    """In the shape of the API to which the request belongs."""
    if not is_anthropic(request):
        return error_response(error)
    named = request_id(request)
    response = error_response(error, ANTHROPIC_ERRORS, named)
    response.headers[ANTHROPIC_REQUEST_ID] = named
    return response


def route_of(request: web.BaseRequest) -> str:
    """The path of a request as its record has it; UNKNOWN_ROUTE if there is none."""
    path = request.path
    if path in HANDLERS:
        return path
    if path.startswith(ADMIN_PREFIX) and (template := template_of(request.rel_url.raw_path)):
        return template
    for folder, routes in _BY_FOLDER.items():
        if path.startswith(folder) and len(path) > len(folder):
            plain = routes.get("")
            if plain is not None and plain.takes_slashes:
                return plain.path
            name, _, operation = path.removeprefix(folder).partition("/")
            found = routes.get(operation) if name and (operation or name not in _NO_IDS) else None
            if found is None and name and "/" in operation:
                kind, _, rest = operation.partition("/")
                found = routes.get(f"{kind}/{{}}{''.join(rest.partition('/')[1:])}")
            return UNKNOWN_ROUTE if found is None else found.path
    return UNKNOWN_ROUTE


def _methods(route: str) -> Sequence[str]:
    """Returns the methods that a browser may send. A page also gets to read why a path does not exist."""
    return tuple(HANDLERS.get(route, ("GET", "POST", "DELETE")))


def _handler(request: web.BaseRequest, route: str) -> Handler:
    methods = HANDLERS.get(route)
    if methods is None:
        refuse_operation(request.method, request.path)
        refuse_unserved(request.path, HANDLERS)
        raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, not_found_message(request.path, HANDLERS))
    handler = methods.get(request.method)
    if handler is None:
        refuse_operation(request.method, request.path)
        if route in _STATE_PATHS:
            return _wrong_method
        raise _not_allowed(request, methods)
    return handler


async def _wrong_method(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """A path of stored objects takes no method without an orchestrator. Raises KvloomError."""
    orchestrator_of(edge, request)
    raise _not_allowed(request, HANDLERS[route_of(request)])


def _not_allowed(request: web.BaseRequest, methods: Iterable[str]) -> KvloomError:
    message = f"This path does not take {request.method[:16]}, only {', '.join(methods)}."
    return KvloomError(ErrorReason.ERROR_REASON_METHOD_NOT_ALLOWED, message)


def _check_header_size(request: web.BaseRequest, max_bytes: int) -> None:
    size_bytes = sum(map(len, itertools.chain.from_iterable(request.raw_headers)))
    if size_bytes > max_bytes:
        raise KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, f"The headers are larger than {max_bytes} bytes.")


_BASE: Final = (
    "OpenAI's clients have the server's address with /v1 as their base URL, Anthropic's the address without it."
)
_PREFIX: Final = re.compile(r"(?:/(?:v\d+(?:beta|alpha)?|api|openai|anthropic|deployments/[^/]+|engines/[^/]+))*")


def not_found_message(path: str, routes: Container[str]) -> str:
    """Says that there is no such path, and which one was meant if that can be told."""
    for candidate in _candidates(path):
        if candidate != path and candidate in routes:
            return f"This path does not exist. Did you mean {candidate}? {_BASE}"
    if path.rstrip("/") in ("/v1", "") or path.startswith("/v1/"):
        return f"This path does not exist. GET /v1/models lists the models, and GET /docs all paths. {_BASE}"
    return "This path does not exist. GET /docs lists all paths."


def _candidates(path: str) -> Iterator[str]:
    plain = re.sub("/{2,}", "/", path).rstrip("/")
    yield plain
    prefix = _PREFIX.match(plain)
    rest = plain[prefix.end() :] if prefix is not None else plain
    yield "/v1" + rest
    yield rest
    # The whole URL of an endpoint as the base URL.
    for endpoint in ("/chat/completions", "/responses", "/messages", "/completions", "/embeddings"):
        if rest.startswith(endpoint + "/"):
            yield "/v1" + endpoint
