"""Cross-origin resource sharing: which web pages of other origins may use the API from a browser (`edge.cors_origins`).

A browser asks before it sends such a request (a preflight), and shows the page only the response headers that the
server exposes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from aiohttp import web

from edge_http.formatting.limit_headers import ANTHROPIC_LIMIT_HEADERS, OPENAI_LIMIT_HEADERS
from edge_http.wire.headers import (
    ANTHROPIC_REQUEST_ID,
    BROWNOUT,
    BUDGET_REMAINING,
    CACHE,
    CACHED_TOKENS,
    COST,
    DROPPED_REASON,
    FAILOVER,
    LIMITED_BY,
    MODEL,
    PRIORITY_CLASS,
    PROCESSING_MS,
    REASON,
    REPLAYED,
    REQUEST_ID,
    RESPONSE_ID,
    RESUME,
    RETRY_AFTER,
    RETRY_AFTER_MS,
    ROUTE,
    SHARD,
    SHOULD_RETRY,
)

ANY_ORIGIN: Final = "*"
MAX_AGE_SECONDS: Final = 600
"""How long a browser may remember the answer to a preflight."""

_ALLOWED_HEADERS: Final = (
    "authorization",
    "content-type",
    "x-api-key",
    "anthropic-version",
    "anthropic-beta",
    "anthropic-dangerous-direct-browser-access",
    "idempotency-key",
    "last-event-id",
    "openai-organization",
    "openai-project",
    "traceparent",
    "x-correlation-id",
    "x-kvloom-cache",
    "x-kvloom-deadline-ms",
    "x-kvloom-details",
    "x-kvloom-explain",
    "x-kvloom-receipt",
    "x-kvloom-resume",
    "x-kvloom-slo-tpot-ms",
    "x-kvloom-slo-ttft-ms",
    "x-llm-d-inference-fairness-id",
    "x-llm-d-inference-objective",
    "x-llm-d-slo-tpot-ms",
    "x-llm-d-slo-ttft-ms",
    "x-request-id",
    "x-session-id",
)
_ALLOWED_PREFIXES: Final = ("x-kvloom-", "x-stainless-")  # the latter: what the official clients tell of themselves
_EXPOSED_HEADERS: Final = (
    REQUEST_ID,
    ANTHROPIC_REQUEST_ID,
    RESPONSE_ID,
    RESUME,
    REPLAYED,
    BROWNOUT,
    CACHE,
    SHARD,
    CACHED_TOKENS,
    MODEL,
    ROUTE,
    PRIORITY_CLASS,
    COST,
    BUDGET_REMAINING,
    LIMITED_BY,
    REASON,
    FAILOVER,
    DROPPED_REASON,
    SHOULD_RETRY,
    RETRY_AFTER,
    RETRY_AFTER_MS,
    PROCESSING_MS,
    *OPENAI_LIMIT_HEADERS,
    *ANTHROPIC_LIMIT_HEADERS,
)
_MAX_REQUESTED_HEADERS: Final = 64
_TOKEN: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}")


class Cors:
    """Decides by a request's Origin which headers its response carries."""

    def __init__(self, origins: Sequence[str]) -> None:
        """`origins` are as in the configuration, and not empty."""
        self._origins = frozenset(origins)
        self._any = ANY_ORIGIN in self._origins
        self._exposed = ", ".join(_EXPOSED_HEADERS)

    def allows(self, origin: str) -> bool:
        """Say if pages of this origin may use the API."""
        return self._any or origin in self._origins

    def response_headers(self, request: web.BaseRequest) -> Mapping[str, str]:
        """The headers that let the page read the response. Without a listed origin there is only `Vary`, which keeps a
        cache from giving this response to a page that may read it, or the reverse."""
        origin = request.headers.get("Origin", "")
        if self._any:
            return {"Access-Control-Allow-Origin": ANY_ORIGIN, "Access-Control-Expose-Headers": self._exposed}
        if origin not in self._origins:
            return {"Vary": "Origin"}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": origin,
            # For clients' certificates. With "*" they are not allowed: any page could use its visitor's.
            "Access-Control-Allow-Credentials": "true",
            "Access-Control-Expose-Headers": self._exposed,
        }

    def preflight(self, request: web.BaseRequest, methods: Sequence[str]) -> web.Response | None:
        """The answer to a browser's question whether it may send a request to a path that takes these methods; None if
        the request is no such question. The browser asks without the page's API key, so none is needed."""
        headers = request.headers
        if request.method != "OPTIONS" or "Origin" not in headers or "Access-Control-Request-Method" not in headers:
            return None
        response = web.Response(status=204)
        if self.allows(headers["Origin"]):
            response.headers["Access-Control-Allow-Methods"] = ", ".join(methods)
            response.headers["Access-Control-Allow-Headers"] = ", ".join(self._allowed_headers(request))
            response.headers["Access-Control-Max-Age"] = str(MAX_AGE_SECONDS)
        return response

    def _allowed_headers(self, request: web.BaseRequest) -> list[str]:
        requested = request.headers.get("Access-Control-Request-Headers", "").lower().split(",")
        names = (name.strip() for name in requested[:_MAX_REQUESTED_HEADERS])
        # A page that any origin may serve has no cookies here, so no header of its own can do harm.
        prefixes = ("",) if self._any else _ALLOWED_PREFIXES
        more = {name for name in names if name.startswith(prefixes) and _TOKEN.fullmatch(name)}
        return [*_ALLOWED_HEADERS, *sorted(more.difference(_ALLOWED_HEADERS))]
