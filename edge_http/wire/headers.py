"""The request headers that the edge reads, and the headers that its responses carry."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

from aiohttp import web

from edge_http.formatting.error_formats import ANTHROPIC_ERRORS, error_format_of
from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import RESULT_CACHE_USE_HIT, RESULT_CACHE_USE_MISS, SequenceStart

REQUEST_ID: Final = "x-request-id"
ANTHROPIC_REQUEST_ID: Final = "request-id"
ANTHROPIC_VERSION: Final = "anthropic-version"
PROCESSING_MS: Final = "openai-processing-ms"
"""The time from a request's head to that of its response."""
DETAILS: Final = "x-kvloom-details"
EXPLAIN: Final = "x-kvloom-explain"
SHARD: Final = "x-kvloom-shard"
CACHED_TOKENS: Final = "x-kvloom-cached-tokens"
FILE_SEARCH: Final = "x-kvloom-file-search"
"""Why an answer comes without the passages of a file search, e.g. "timeout"."""
CONTEXT: Final = "x-kvloom-context"
"""The header "last-known" of an answer to a conversation of which only that could be told what came before."""
LIMITED_BY: Final = "x-kvloom-limited-by"
"""The limit of the caller that cut an answer short."""
COST: Final = "x-kvloom-cost"
BUDGET_REMAINING: Final = "x-kvloom-budget-remaining"
"""The headers with an answer's cost, and with what its caller's monthly budget has left, in units of the currency."""
PRIORITY_CLASS: Final = "x-kvloom-priority-class"
"""In a request: its class. In a response: the class with which it was served."""
OBJECTIVE: Final = "x-llm-d-inference-objective"
"""The same, as clients of llm-d name it."""
FAIRNESS_ID: Final = "x-llm-d-inference-fairness-id"
"""Divides the caller's own requests into sub-flows; it is never the identity of another caller."""
REASON: Final = "x-kvloom-reason"
"""How a router ended the request, and why, e.g. "rejected-queue-full"; of an answer, what had happened to it on its
way, e.g. "preempted" (docs/concepts/scheduling.md)."""
DROPPED_REASON: Final = "x-llm-d-request-dropped-reason"
"""The same of a request that no shard has seen, as clients of llm-d name it."""
FAILOVER: Final = "x-kvloom-failover"
"""The header of an answer that continued on another shard: "exact" if its tokens are those that there would have been
without, "resampled" if they may be others."""
RETRY_AFTER: Final = "Retry-After"
RETRY_AFTER_MS: Final = "retry-after-ms"
SHOULD_RETRY: Final = "x-should-retry"
CACHE: Final = "x-kvloom-cache"
"""In a request: whether the result cache may be used. In a response: whether it had the answer."""
BROWNOUT: Final = "x-kvloom-brownout"
"""How the answer is degraded."""
SAFETY: Final = "x-kvloom-safety"
"""The rules of the safety policy that hold for an answer whose request names guardrails, or wants details."""
DEADLINE: Final = "x-kvloom-deadline-ms"
SLO_TTFT: Final = "x-kvloom-slo-ttft-ms"
SLO_TPOT: Final = "x-kvloom-slo-tpot-ms"
SLO_TTFT_LLM_D: Final = "x-llm-d-slo-ttft-ms"
"""The same, as clients of llm-d name it."""
SLO_TPOT_LLM_D: Final = "x-llm-d-slo-tpot-ms"
RECEIPT: Final = "x-kvloom-receipt"
STRICT: Final = "x-kvloom-strict"
"""In a request: whether every field that is not known is refused."""
MODEL: Final = "x-kvloom-model"
"""The model that answers, where a route or a list of models was requested; ROUTE then says how it was chosen."""
ROUTE: Final = "x-kvloom-route"
RESPONSE_ID: Final = "x-kvloom-response-id"
RESUME: Final = "x-kvloom-resume"
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
REPLAYED: Final = "Idempotent-Replayed"
"""Tells a client that repeats its request with its key that it gets the answer of the first request."""
RELAYED: Final = "x-kvloom-relayed"
"""A header with the tag of the edge that the request is intended for."""
RELAYED_CERTIFICATE: Final = "x-kvloom-relayed-certificate"
"""A header with the certificate of the client whose request is relayed, which only processes of the fabric can read."""
LAST_EVENT_ID: Final = "Last-Event-ID"
MAX_EVENT_NUMBER: Final = 2**53
SESSION_ID: Final = "x-session-id"
MAX_SESSION_KEY_CHARS: Final = 256
_DROPPED: Final = ("rejected", "evicted")
_REQUEST_ID_KEY: Final = web.RequestKey("request_id", str)
_SAFE_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.{0,128})?"
)


class UnservedVersionRequest(web.BaseRequest):
    """The request line names a version of HTTP that this server does not speak."""


def request_id(request: web.BaseRequest) -> str:
    """Return the client's x-request-id (or x-correlation-id) if it is safe for headers and logs, else a new one."""
    try:
        return request[_REQUEST_ID_KEY]
    except KeyError:  # a request's `get` would catch it too, one call later
        pass
    given = request.headers.get(REQUEST_ID) or request.headers.get("x-correlation-id") or ""
    chosen = given if given and _SAFE_ID.fullmatch(given) else new_request_id()
    request[_REQUEST_ID_KEY] = chosen
    return chosen


def new_request_id() -> str:
    return f"req-{os.urandom(12).hex()}"


def is_anthropic(request: web.BaseRequest) -> bool:
    """True when the response has Anthropic's shape."""
    return error_format_of(request.path, has_anthropic_version=ANTHROPIC_VERSION in request.headers) is ANTHROPIC_ERRORS


def check_head(request: web.BaseRequest) -> None:
    """Refuse what aiohttp reads and this server does not speak. Raises KvloomError (UNSUPPORTED_TRANSFER_CODING,
    UNSUPPORTED_HTTP_VERSION)."""
    if isinstance(request, UnservedVersionRequest):
        raise KvloomError(
            ErrorReason.ERROR_REASON_UNSUPPORTED_HTTP_VERSION, "This server speaks HTTP/1.0 and HTTP/1.1 on this port."
        )
    # aiohttp reads any body whose last transfer coding is chunked, as if it had no other. A proxy that decodes the
    # others would see another body.
    codings = request.headers.getall("Transfer-Encoding", None)
    if codings is not None and [coding.lower() for coding in codings] != ["chunked"]:
        raise unsupported_transfer_coding()


def unsupported_transfer_coding() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_UNSUPPORTED_TRANSFER_CODING,
        "The only Transfer-Encoding that this server supports is chunked.",
        field="Transfer-Encoding",
    )


def traceparent(request: web.BaseRequest) -> str:
    """Return the W3C trace context to propagate, or "" if it is missing or malformed."""
    given = request.headers.get("traceparent")
    return given if given and _TRACEPARENT.fullmatch(given) else ""


def session_key(request: web.BaseRequest, prompt_cache_key: str | None) -> str:
    """Return the key of the conversation: the body's field, else the x-session-id header, else "". Raises KvloomError
    (INVALID_ARGUMENT) if the key is too long or not printable."""
    field, key = "prompt_cache_key", prompt_cache_key
    if not key:
        field, key = SESSION_ID, request.headers.get(SESSION_ID)
    if not key:
        return ""
    if not key.isprintable():  # this also rejects lone surrogates, which could not be encoded
        raise invalid_argument(f"{field} must be printable text.", field)
    if len(key) > MAX_SESSION_KEY_CHARS:
        raise invalid_argument(f"{field} has {len(key)} characters; at most {MAX_SESSION_KEY_CHARS}.", field)
    return key


def wants_details(request: web.BaseRequest) -> bool:
    given = request.headers.get(DETAILS)
    return given is not None and given.lower() == "true"


def wants_explanation(request: web.BaseRequest) -> bool:
    given = request.headers.get(EXPLAIN)
    return given is not None and given.lower() in ("1", "true")


def wants_receipt(request: web.BaseRequest) -> bool:
    """Return whether the answer is to come with a signed receipt."""
    given = request.headers.get(RECEIPT)
    return given is not None and given.lower() == "true"


def refuses_result_cache(request: web.BaseRequest) -> bool:
    """Return whether the client wants a new answer, which is not kept. Raises KvloomError (INVALID_ARGUMENT)."""
    given = request.headers.get(CACHE)
    if given is not None and given.lower() not in ("on", "off"):
        raise invalid_argument(f"{CACHE} must be on or off.", CACHE)
    if given is not None:
        return given.lower() == "off"
    return "no-store" in request.headers.get("Cache-Control", "").lower()


def start_headers(start: SequenceStart | None) -> dict[str, str]:
    """Return the response headers that tell how the answer is degraded, if it is, and which rules of the safety policy
    hold for it, if its request names some."""
    if start is None:
        return {}
    found = {BROWNOUT: start.brownout} if start.brownout else {}
    if start.safety_rules:
        found[SAFETY] = quote(start.safety_rules, safe=" ,;:()[]/+@")
    return found


def reason(error: KvloomError) -> dict[str, str]:
    """Return the response headers that tell how a router ended a request and why; they are empty if no router did."""
    if not error.end:
        return {}
    value = f"{error.end}-{error.reason_name.lower().replace('_', '-')}"
    return {REASON: value, DROPPED_REASON: value} if error.end in _DROPPED else {REASON: value}


def moved(words: Iterable[str], failover: str) -> dict[str, str]:
    """Return the response headers that tell that an answer had to continue on another shard, why, and how (FAILOVER; ""
    where its router does not say)."""
    headers = {REASON: ", ".join(words).replace("_", "-")}
    return {**headers, FAILOVER: failover} if failover else headers


def cache_use(uses: Iterable[int]) -> dict[str, str]:
    """Return the response header that tells whether the result cache had an answer. `uses` are the `ResultCacheUse` of
    its parts."""
    found = set(uses)
    if found == {RESULT_CACHE_USE_HIT}:
        return {CACHE: "hit"}
    return {CACHE: "miss" if found & {RESULT_CACHE_USE_HIT, RESULT_CACHE_USE_MISS} else "off"}


def wants_resume(request: web.BaseRequest) -> bool | None:
    """Return whether the client wants a resumable stream, or None if it does not specify. Raises KvloomError
    (INVALID_ARGUMENT)."""
    given = request.headers.get(RESUME)
    if given is None:
        return None
    if given.lower() not in ("on", "off"):
        raise invalid_argument(f"{RESUME} must be on or off.", RESUME)
    return given.lower() == "on"


def idempotency_key(request: web.BaseRequest) -> str:
    """Return the client's idempotency key, or "" if there is none. Raises KvloomError (INVALID_ARGUMENT)."""
    given = request.headers.get(IDEMPOTENCY_KEY, "")
    if given and not _SAFE_ID.fullmatch(given):
        message = f"{IDEMPOTENCY_KEY} must have at most 128 letters, digits or ._:/+=@-"
        raise invalid_argument(message, IDEMPOTENCY_KEY)
    return given


def last_event_id(request: web.BaseRequest) -> int | None:
    """Return the last event that the client has, or None if it does not specify. Raises KvloomError
    (INVALID_ARGUMENT)."""
    given = request.headers.get(LAST_EVENT_ID, "")
    return event_number(given, LAST_EVENT_ID) if given else None


def event_number(given: str, field: str) -> int:
    """Parse the number of an event. Raises KvloomError (INVALID_ARGUMENT)."""
    if not (given.isascii() and given.isdigit() and len(given) <= 16 and int(given) <= MAX_EVENT_NUMBER):
        raise invalid_argument(f"{field} must be the number of an event, or 0.", field)
    return int(given)


def explanation(start: SequenceStart | None) -> dict[str, str]:
    """Return the response headers that `x-kvloom-explain` requests; they are empty if no sequence has started."""
    if start is None:
        return {}
    return {SHARD: quote(start.shard_id, safe="-._~:@"), CACHED_TOKENS: str(start.num_cached_tokens)}
