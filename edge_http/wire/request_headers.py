"""The headers by which a client asks for something: read and checked once, into one record."""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from edge_http.wire.headers import (
    CACHE,
    DEADLINE,
    DETAILS,
    EXPLAIN,
    FAIRNESS_ID,
    IDEMPOTENCY_KEY,
    OBJECTIVE,
    PRIORITY_CLASS,
    RECEIPT,
    RESUME,
    SLO_TPOT,
    SLO_TPOT_LLM_D,
    SLO_TTFT,
    SLO_TTFT_LLM_D,
    idempotency_key,
    refuses_result_cache,
    wants_details,
    wants_explanation,
    wants_receipt,
    wants_resume,
)
from kvloom.v1.router_service_pb2 import GenerateRequest

OBJECTIVE_HEADERS: Final = frozenset((DEADLINE, SLO_TTFT, SLO_TPOT, SLO_TTFT_LLM_D, SLO_TPOT_LLM_D))
CLASS_HEADERS: Final = frozenset((PRIORITY_CLASS, OBJECTIVE, FAIRNESS_ID))
_OTHERS: Final = frozenset((CACHE, "Cache-Control", DETAILS, EXPLAIN, IDEMPOTENCY_KEY, RECEIPT, RESUME))
_ALL: Final = OBJECTIVE_HEADERS | CLASS_HEADERS | _OTHERS


class RequestHeaders(msgspec.Struct, frozen=True):
    """The wishes of a client, as far as its headers have them. Those of most requests have none."""

    has_class: bool = False
    """True when a header names its class or its sub-flow."""
    has_objectives: bool = False
    """True when a header says how fast the answer is wanted."""
    idempotency_key: str = ""
    resume: bool | None = None
    """None: the headers do not say whether the stream outlives its connection."""
    wants_details: bool = False
    wants_explanation: bool = False
    wanted: GenerateRequest = GenerateRequest()
    """The fields of the request to the router that headers set; it is never changed."""


NO_WISHES: Final = RequestHeaders()
_KEY: Final = web.RequestKey("headers", RequestHeaders)


def headers_of(request: web.BaseRequest) -> RequestHeaders:
    """Return the record of a request, which is made at the first call. Raises KvloomError (INVALID_ARGUMENT) that
    names a header."""
    names = request.headers.keys()
    if names.isdisjoint(_ALL):
        return NO_WISHES
    if _KEY not in request:
        request[_KEY] = RequestHeaders(
            has_class=not names.isdisjoint(CLASS_HEADERS),
            has_objectives=not names.isdisjoint(OBJECTIVE_HEADERS),
            idempotency_key=idempotency_key(request),
            resume=wants_resume(request),
            wants_details=wants_details(request),
            wants_explanation=wants_explanation(request),
            wanted=GenerateRequest(
                no_result_cache=refuses_result_cache(request),
                receipt=wants_receipt(request),
                tells_safety_rules=wants_details(request),
            ),
        )
    return request[_KEY]
