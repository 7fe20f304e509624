"""The routing table, and the one place where every failure becomes an error of the API that was called."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import structlog
from aiohttp import web

from edge_http.admin.handler import administer
from edge_http.admin.routes import BY_PATH as ADMIN_PATHS
from edge_http.admin.routes import PREFIX as ADMIN_PREFIX
from edge_http.admin.routes import template_of
from edge_http.edge import Edge
from edge_http.endpoints.embeddings import embeddings
from edge_http.endpoints.generation import chat_completions, completions
from edge_http.endpoints.health import health, metrics, metrics_targets, ready, version
from edge_http.endpoints.lora_adapters import load_lora_adapter, unload_lora_adapter
from edge_http.endpoints.messages import count_tokens, messages
from edge_http.endpoints.models import get_model, list_models
from edge_http.endpoints.moderations import moderations
from edge_http.endpoints.not_served import refuse_operation, refuse_unserved
from edge_http.endpoints.page import PAGE_ROUTES
from edge_http.endpoints.ranking import rerank, score
from edge_http.endpoints.receipts import receipt_keys
from edge_http.endpoints.responses import count_input_tokens, responses
from edge_http.endpoints.resume import cancel_response, resume_stream
from edge_http.endpoints.tokenization import detokenize, tokenize
from edge_http.endpoints.usage import usage
from edge_http.formatting.error_formats import ANTHROPIC_ERRORS
from edge_http.server.api_docs import openapi_json
from edge_http.server.wrong_paths import not_found_message
from edge_http.wire.headers import (
    ANTHROPIC_REQUEST_ID,
    check_head,
    is_anthropic,
    request_id,
)
from edge_http.wire.json_response import error_response
from edge_http.wire.request_record import CLIENT_CLOSED_REQUEST, RequestRecord
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.process.request_context import enter_request
from kvloom_common.tenancy.scopes import Scope

log = structlog.get_logger()

Handler = Callable[[Edge, web.BaseRequest], Awaitable[web.StreamResponse]]
MAX_NAMED_MODELS: Final = 16
MODEL_ROUTE: Final = "/v1/models/{id}"
CHAT_ROUTE: Final = "/v1/chat/completions/{id}"
COMPLETION_ROUTE: Final = "/v1/completions/{id}"
RESPONSE_ROUTE: Final = "/v1/responses/{id}"
MESSAGE_ROUTE: Final = "/v1/messages/{id}"
UNKNOWN_ROUTE: Final = "unknown"
_NO_IDS: Final = frozenset(("compact", "batches"))
"""These stand in the place of an id in paths of these APIs that are not served."""

ROUTES: Final[Mapping[str, Mapping[str, Handler]]] = {
    "/v1/chat/completions": {"POST": chat_completions},
    "/v1/completions": {"POST": completions},
    "/v1/responses": {"POST": responses},
    "/v1/responses/input_tokens": {"POST": count_input_tokens},
    "/v1/moderations": {"POST": moderations},
    "/v1/embeddings": {"POST": embeddings},
    "/v1/rerank": {"POST": rerank},
    "/v2/rerank": {"POST": rerank},
    "/rerank": {"POST": rerank},
    "/v1/score": {"POST": score},
    "/score": {"POST": score},
    "/tokenize": {"POST": tokenize},
    "/detokenize": {"POST": detokenize},
    "/v1/load_lora_adapter": {"POST": load_lora_adapter},
    "/v1/unload_lora_adapter": {"POST": unload_lora_adapter},
    "/v1/models": {"GET": list_models, "HEAD": list_models},
    MODEL_ROUTE: {"GET": get_model, "HEAD": get_model},
    CHAT_ROUTE: {"GET": resume_stream},
    CHAT_ROUTE + "/cancel": {"POST": cancel_response},
    COMPLETION_ROUTE: {"GET": resume_stream},
    COMPLETION_ROUTE + "/cancel": {"POST": cancel_response},
    RESPONSE_ROUTE: {"GET": resume_stream},
    RESPONSE_ROUTE + "/cancel": {"POST": cancel_response},
    "/v1/messages": {"POST": messages},
    "/v1/messages/count_tokens": {"POST": count_tokens},
    MESSAGE_ROUTE: {"GET": resume_stream},
    MESSAGE_ROUTE + "/cancel": {"POST": cancel_response},
    "/v1/usage": {"GET": usage, "HEAD": usage},
    "/health": {"GET": health, "HEAD": health},
    "/live": {"GET": health, "HEAD": health},
    "/ready": {"GET": ready, "HEAD": ready},
    "/metrics": {"GET": metrics, "HEAD": metrics},
    "/metrics/targets": {"GET": metrics_targets, "HEAD": metrics_targets},
    "/.well-known/kvloom-receipts.json": {"GET": receipt_keys, "HEAD": receipt_keys},
    "/version": {"GET": version, "HEAD": version},
    "/openapi.json": {"GET": openapi_json, "HEAD": openapi_json},
    **{path: dict.fromkeys(methods, administer) for path, methods in ADMIN_PATHS.items()},
    **{path: {"GET": handler, "HEAD": handler} for path, handler in PAGE_ROUTES.items()},
}

OPEN_ROUTES: Final = frozenset(
    ("/health", "/live", "/ready", "/version", "/openapi.json", "/.well-known/kvloom-receipts.json", *PAGE_ROUTES)
)
"""These routes need no API key: the probes of load balancers, the description of the API, which holds no secrets, and
the pages, which ask their users for a key."""


FABRIC_ROUTES: Final = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/metrics", "/metrics/targets"))
"""These routes concern all tenants, so that only administrators of the whole fabric may use them."""
SCOPES: Final[Mapping[str, Scope]] = {
    "/v1/usage": "usage",
    **dict.fromkeys((*FABRIC_ROUTES, *ADMIN_PATHS), "admin"),
}
"""The scope that a key of a tenant needs for a route; for all others it is "inference"."""


class HttpRouter:
    """aiohttp calls this handler for every well-formed request."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        route = _route(request)
        record = RequestRecord(request, self._edge.callers, self._edge.cors)
        enter_request(record)
        try:
            response = await self._answer(request, route, record)
        except BaseException:  # the client has disconnected
            record.log_end(self._edge.access_log, route, CLIENT_CLOSED_REQUEST, 0)
            raise
        self._edge.metrics.on_response(route, response.status)
        num_body_bytes = None
        if isinstance(response, web.Response):  # a stream's head has been sent already
            num_body_bytes = response.content_length
            if self._edge.draining:
                response.force_close()
        if self._edge.access_log.is_on:
            record.log_end(self._edge.access_log, route, response.status, num_body_bytes)
        return response

    async def _answer(self, request: web.BaseRequest, route: str, record: RequestRecord) -> web.StreamResponse:
        try:
            cors = self._edge.cors
            if cors is not None and (response := cors.preflight(request, _methods(route))) is not None:
                return response
            if route not in OPEN_ROUTES:
                if (verification := self._edge.callers.check(request)) is not None:
                    await verification
                if self._edge.callers.have_tenants:
                    self._edge.callers.check_scope(request, SCOPES.get(route, "inference"))
                    if route in FABRIC_ROUTES:
                        self._edge.callers.check_operator(request)
            check_head(request)
            _check_header_size(request, self._edge.config.max_header_bytes)
            return await _handler(request, route)(self._edge, request)
        except KvloomError as error:
            if error.reason == ErrorReason.ERROR_REASON_MODEL_NOT_FOUND and error.message.endswith("does not exist."):
                error = self._with_models(request, error)
            record.error_type = error.reason_name.lower()
            response = _error_response(request, error)
            if error.reason == ErrorReason.ERROR_REASON_METHOD_NOT_ALLOWED:
                response.headers["Allow"] = ", ".join(ROUTES[route])
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
        names = sorted({model.name for model in self._edge.models.values() if model.adapter is None})
        usable = [name for name in names if name in set(self._edge.usable(request, names))]
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


def _route(request: web.BaseRequest) -> str:
    path = request.path
    if path in ROUTES:
        return path
    if path.startswith(ADMIN_PREFIX):
        return template_of(request.rel_url.raw_path) or UNKNOWN_ROUTE
    for route in (MODEL_ROUTE, CHAT_ROUTE, COMPLETION_ROUTE, RESPONSE_ROUTE, MESSAGE_ROUTE):
        folder = route.removesuffix("{id}")
        if path.startswith(folder) and len(path) > len(folder):
            cancel_route = route + "/cancel"
            if cancel_route not in ROUTES:  # names of models may have slashes
                return route
            name, _, operation = path.removeprefix(folder).partition("/")
            if operation == "cancel" and name:
                return cancel_route
            return UNKNOWN_ROUTE if operation or name in _NO_IDS else route
    return UNKNOWN_ROUTE


def _methods(route: str) -> Sequence[str]:
    """Returns the methods that a browser may send. A page also gets to read why a path does not exist."""
    return tuple(ROUTES.get(route, ("GET", "POST", "DELETE")))


def _handler(request: web.BaseRequest, route: str) -> Handler:
    methods = ROUTES.get(route)
    if methods is None:
        refuse_operation(request.method, request.path)
        refuse_unserved(request.path)
        raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, not_found_message(request.path, ROUTES))
    handler = methods.get(request.method)
    if handler is None:
        refuse_operation("UPGRADE" if "Upgrade" in request.headers else request.method, request.path)
        message = f"This path does not take {request.method[:16]}, only {', '.join(methods)}."
        raise KvloomError(ErrorReason.ERROR_REASON_METHOD_NOT_ALLOWED, message)
    return handler


def _check_header_size(request: web.BaseRequest, max_bytes: int) -> None:
    size_bytes = sum(map(len, itertools.chain.from_iterable(request.raw_headers)))
    if size_bytes > max_bytes:
        raise KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, f"The headers are larger than {max_bytes} bytes.")
