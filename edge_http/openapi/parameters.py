"""The headers and query parameters of requests, and the headers of responses, by name."""

from __future__ import annotations

from typing import Any, Final

from edge_http.formatting.limit_headers import ANTHROPIC_LIMIT_HEADERS, OPENAI_LIMIT_HEADERS
from edge_http.wire.headers import (
    ANTHROPIC_REQUEST_ID,
    BROWNOUT,
    BUDGET_REMAINING,
    CACHE,
    CACHED_TOKENS,
    CONTEXT,
    COST,
    DEADLINE,
    DETAILS,
    DROPPED_REASON,
    EXPLAIN,
    FAILOVER,
    FAIRNESS_ID,
    FILE_SEARCH,
    IDEMPOTENCY_KEY,
    LAST_EVENT_ID,
    LIMITED_BY,
    MAX_EVENT_NUMBER,
    MAX_SESSION_KEY_CHARS,
    MODEL,
    OBJECTIVE,
    PRIORITY_CLASS,
    PROCESSING_MS,
    REASON,
    RECEIPT,
    REPLAYED,
    REQUEST_ID,
    RESPONSE_ID,
    RESUME,
    RETRY_AFTER,
    RETRY_AFTER_MS,
    ROUTE,
    SESSION_ID,
    SHARD,
    SHOULD_RETRY,
    SLO_TPOT,
    SLO_TPOT_LLM_D,
    SLO_TTFT,
    SLO_TTFT_LLM_D,
    STRICT,
)
from kvloom.objectives import MAX_MILLISECONDS

_SWITCH: Final = {"type": "string", "enum": ["on", "off"]}
_TRUE: Final = {"type": "string", "enum": ["true"]}
_MILLISECONDS: Final = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_MILLISECONDS}
_EVENT_NUMBER: Final = {"type": "integer", "minimum": 0, "maximum": MAX_EVENT_NUMBER}


def _parameter(name: str, description: str, schema: dict[str, Any], *, place: str = "header") -> dict[str, Any]:
    return {"name": name, "in": place, "description": description, "schema": schema}


PARAMETERS: Final[dict[str, dict[str, Any]]] = {
    REQUEST_ID: _parameter(
        REQUEST_ID, "Names the request in logs and in its response. A value that could forge a header is replaced.",
        {"type": "string", "maxLength": 128},
    ),
    "traceparent": _parameter("traceparent", "The W3C trace context, which is passed on.", {"type": "string"}),
    RESUME: _parameter(RESUME, "on: the stream outlives its connection, so that it can be resumed.", _SWITCH),
    IDEMPOTENCY_KEY: _parameter(
        IDEMPOTENCY_KEY, "With a resumable stream: the same request with the same key gets the answer that it began.",
        {"type": "string", "maxLength": 128, "pattern": "^[A-Za-z0-9._:/+=@-]{1,128}$"},
    ),
    LAST_EVENT_ID: _parameter(
        LAST_EVENT_ID, "The number of the last event that the client has; precedes starting_after.", _EVENT_NUMBER
    ),
    PRIORITY_CLASS: _parameter(
        PRIORITY_CLASS, "The class of the request (docs/concepts/scheduling.md).", {"type": "string"}
    ),
    OBJECTIVE: _parameter(OBJECTIVE, "The same, as clients of llm-d name it.", {"type": "string"}),
    FAIRNESS_ID: _parameter(
        FAIRNESS_ID, "Divides the caller's own requests into sub-flows.", {"type": "string", "maxLength": 256}
    ),
    DETAILS: _parameter(DETAILS, "true: the answer tells its shard and its cached tokens.", _TRUE),
    CACHE: _parameter(CACHE, "off: the result cache neither has the answer nor keeps it; on by default.", _SWITCH),
    RECEIPT: _parameter(RECEIPT, "true: the answer comes with a signed receipt.", _TRUE),
    STRICT: _parameter(STRICT, "true: all fields that are not known are refused; otherwise hints pass.", _TRUE),
    EXPLAIN: _parameter(
        EXPLAIN, "1: the head of the response tells the shard and the cached tokens.", {"type": "string", "enum": ["1"]}
    ),
    DEADLINE: _parameter(
        DEADLINE, "The answer is complete within so many milliseconds of the request's arrival, or fails.",
        _MILLISECONDS,
    ),
    SLO_TTFT: _parameter(
        SLO_TTFT, f"The first token is due after so many milliseconds, or the request is refused; or {SLO_TTFT_LLM_D}.",
        _MILLISECONDS,
    ),
    SLO_TPOT: _parameter(
        SLO_TPOT, f"The mean milliseconds between tokens; it is preferred and measured; also {SLO_TPOT_LLM_D}.",
        _MILLISECONDS,
    ),
    SESSION_ID: _parameter(
        SESSION_ID, "Requests with the same value belong together; a hint for placement.",
        {"type": "string", "maxLength": MAX_SESSION_KEY_CHARS},
    ),
    "stream": {
        **_parameter("stream", "Only streams can be resumed.", _TRUE, place="query"),
        "required": True,
    },
    "starting_after": _parameter(
        "starting_after", "The number of the last event that the client has.", _EVENT_NUMBER, place="query"
    ),
    "first_day": _parameter("first_day", "The first day, of UTC: 2026-11-25.", {"type": "string"}, place="query"),
    "last_day": _parameter("last_day", "The last day.", {"type": "string"}, place="query"),
    "by": _parameter(
        "by",
        "The keys to group by, separated by commas: day, model, key, tier, class; for administrators also tenant.",
        {"type": "string"},
        place="query",
    ),
    "tenant": _parameter("tenant", "Only this tenant, ORGANISATION/PROJECT.", {"type": "string"}, place="query"),
    "max_requests": _parameter(
        "max_requests", "How many requests are listed that run, and how many that ended; 50 if it is not given.",
        {"type": "integer", "minimum": 0, "maximum": 1000}, place="query",
    ),
    "samples_after": _parameter(
        "samples_after", "Only samples after this time, in seconds since 1970.", {"type": "number"}, place="query"
    ),
    "format": _parameter("format", "json or csv.", {"type": "string", "enum": ["json", "csv"]}, place="query"),
    "after": _parameter("after", "The id of the last entry of the page before.", {"type": "string"}, place="query"),
    "before": _parameter("before", "The id of the first entry of the page behind.", {"type": "string"}, place="query"),
    "file_status": _parameter(
        "filter", "Only files with this status.",
        {"type": "string", "enum": ["in_progress", "completed", "failed", "cancelled"]}, place="query",
    ),
    "limit": _parameter(
        "limit", "How many entries a page has.", {"type": "integer", "minimum": 1, "maximum": 10_000}, place="query"
    ),
    "order": _parameter("order", "By age.", {"type": "string", "enum": ["asc", "desc"]}, place="query"),
    "stored_model": _parameter("model", "Only those of this model.", {"type": "string"}, place="query"),
    "search": _parameter(
        "search", "Only conversations that have an item with all of these words.", {"type": "string"}, place="query"
    ),
    "deleted": _parameter("deleted", "true: those that are deleted and can be restored.", _TRUE, place="query"),
    "rating": _parameter(
        "rating", "Only feedback with this thumb.", {"type": "string", "enum": ["up", "down"]}, place="query"
    ),
    "feedback": _parameter(
        "feedback", "Only responses with feedback, or with this thumb.",
        {"type": "string", "enum": ["any", "up", "down"]}, place="query",
    ),
    "prompt_version": _parameter("version", "Not the latest version, but this one.", {"type": "string"}, place="query"),
    "purpose": _parameter("purpose", "Only files of this purpose.", {"type": "string"}, place="query"),
    "page_size": _parameter(
        "page_size", "How many entries a page has; 100 if it is not given.",
        {"type": "integer", "minimum": 0, "maximum": 1000}, place="query",
    ),
    "page_token": _parameter("page_token", "`next_page_token` of the page before.", {"type": "string"}, place="query"),
    "organisation": _parameter("organisation", "Only what belongs to it.", {"type": "string"}, place="query"),
    "project": _parameter("project", "Only what belongs to it.", {"type": "string"}, place="query"),
    "model": _parameter("model", "Only prices of this model.", {"type": "string"}, place="query"),
    "target": _parameter(
        "target", "Only changes of this one, e.g. `key:ID` or `tenant:ORGANISATION/PROJECT`.", {"type": "string"},
        place="query",
    ),
    "show_revoked": _parameter("show_revoked", "Revoked keys, too.", {"type": "boolean"}, place="query"),
    "create_project": _parameter(
        "create_project", "Add the project and its organisation, too.", {"type": "boolean"}, place="query"
    ),
    "create_organisation": _parameter(
        "create_organisation", "Add the organisation, too.", {"type": "boolean"}, place="query"
    ),
}  # fmt: skip

_DECIMAL: Final = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}
_LIMIT_TEXTS: Final = {
    "limit": "The most {unit} a minute, of the caller's account that leaves least.",
    "remaining": "How many {unit} are left of them now.",
    "reset": "When all {unit} will be left again: {how}.",
}


def _limit_header(name: str) -> dict[str, Any]:
    parts = name.split("ratelimit-")[1].split("-")
    what = next(part for part in parts if part in _LIMIT_TEXTS)
    unit = " ".join(part for part in parts if part != what)
    how = "in how long, such as 6m0s" if name in OPENAI_LIMIT_HEADERS else "a time of RFC 3339"
    schema = {"type": "string"} if what == "reset" else {"type": "integer", "minimum": 0}
    return {"description": _LIMIT_TEXTS[what].format(unit=unit, how=how), "schema": schema}


RESPONSE_HEADERS: Final[dict[str, dict[str, Any]]] = {
    REQUEST_ID: {"description": "The request's own id, or a new one.", "schema": {"type": "string"}},
    PROCESSING_MS: {
        "description": "Milliseconds from the request's head to this one.",
        "schema": {"type": "integer", "minimum": 0},
    },
    ANTHROPIC_REQUEST_ID: {"description": "The same id, as Anthropic names it.", "schema": {"type": "string"}},
    RETRY_AFTER: {
        "description": "After how many seconds a retry makes sense.",
        "schema": {"type": "integer", "minimum": 0},
    },
    RETRY_AFTER_MS: {"description": "The same, in milliseconds.", "schema": {"type": "integer", "minimum": 0}},
    REASON: {
        "description": "How a router ended the request, such as `rejected-queue-full`; of an answer, `preempted`.",
        "schema": {"type": "string"},
    },
    CONTEXT: {
        "description": "`last-known`: storage is slow or away, and the answer continues what this edge knew.",
        "schema": {"type": "string"},
    },
    FILE_SEARCH: {
        "description": "Why an answer comes without the passages of its file search, such as `timeout` or `no_room`.",
        "schema": {"type": "string"},
    },
    FAILOVER: {
        "description": "The answer continued on another shard. exact: it has the tokens that it would have had.",
        "schema": {"type": "string", "enum": ["exact", "resampled"]},
    },
    DROPPED_REASON: {
        "description": "The same of a request that was never sent to a shard.",
        "schema": {"type": "string"},
    },
    SHOULD_RETRY: {
        "description": "A retry would be refused, too: the budget is used up.",
        "schema": {"type": "string", "enum": ["false"]},
    },
    REPLAYED: {
        "description": f"The answer is that of the first request with this {IDEMPOTENCY_KEY}.",
        "schema": {"type": "string", "enum": ["true"]},
    },
    MODEL: {
        "description": "The model that answers, if a route or a list of models was requested.",
        "schema": {"type": "string"},
    },
    ROUTE: {"description": "How it was chosen.", "schema": {"type": "string"}},
    PRIORITY_CLASS: {"description": "The class with which the request was served.", "schema": {"type": "string"}},
    LIMITED_BY: {
        "description": "The caller's limit that has cut the answer short.",
        "schema": {"type": "string"},
    },
    COST: {
        "description": "The cost of the answer, in units of the currency, in a fabric with tenants.",
        "schema": _DECIMAL,
    },
    BUDGET_REMAINING: {
        "description": "The rest of the caller's monthly budget, if there is one, as of a few seconds ago.",
        "schema": _DECIMAL,
    },
    **{name: _limit_header(name) for name in (*OPENAI_LIMIT_HEADERS, *ANTHROPIC_LIMIT_HEADERS)},
    RESPONSE_ID: {"description": "The id of the answer, with which it can be resumed.", "schema": {"type": "string"}},
    RESUME: {"description": "For how many seconds the stream can be resumed.", "schema": {"type": "string"}},
    SHARD: {"description": f"The shard that answers, if {EXPLAIN} asked for it.", "schema": {"type": "string"}},
    CACHE: {
        "description": "hit: the result cache had the answer. Sent if routers have one.",
        "schema": {"type": "string", "enum": ["hit", "miss", "off"]},
    },
    BROWNOUT: {
        "description": "How the answer was degraded because its model is overloaded: the step of the brownout "
        "ladder, and what it changed. Absent when nothing was.",
        "schema": {"type": "string", "examples": ["2; max_tokens=512; no_speculation"]},
    },
    CACHED_TOKENS: {
        "description": "How many of the prompt's tokens were in its cache.",
        "schema": {"type": "integer", "minimum": 0},
    },
}

EVERY_RESPONSE: Final = (REQUEST_ID, PROCESSING_MS)
EVERY_ERROR: Final = (*EVERY_RESPONSE, RETRY_AFTER, RETRY_AFTER_MS, REASON, DROPPED_REASON, SHOULD_RETRY)
OPENAI_LIMITS: Final = (*OPENAI_LIMIT_HEADERS, LIMITED_BY)
ANTHROPIC_LIMITS: Final = (ANTHROPIC_REQUEST_ID, *ANTHROPIC_LIMIT_HEADERS, LIMITED_BY)
"""The headers of responses that are charged to a caller's limits, and of refusals."""
GENERATION: Final = (
    *(REQUEST_ID, "traceparent", SESSION_ID, DETAILS, EXPLAIN, CACHE, RECEIPT, RESUME, STRICT),
    *(IDEMPOTENCY_KEY, LAST_EVENT_ID, PRIORITY_CLASS, OBJECTIVE, FAIRNESS_ID, DEADLINE, SLO_TTFT, SLO_TPOT),
)
"""The parameters of requests that generate."""
