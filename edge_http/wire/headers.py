"""Request headers that mean something here, and the ones that every answer carries."""

from __future__ import annotations

import os
import re
from typing import Final
from urllib.parse import quote

from aiohttp import web

from kvloom.errors import invalid_argument
from kvloom.v1.generation_pb2 import SequenceStart

REQUEST_ID: Final = "x-request-id"
DETAILS: Final = "x-kvloom-details"
EXPLAIN: Final = "x-kvloom-explain"
SHARD: Final = "x-kvloom-shard"
CACHED_TOKENS: Final = "x-kvloom-cached-tokens"
RESPONSE_ID: Final = "x-kvloom-response-id"
RESUME: Final = "x-kvloom-resume"
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
LAST_EVENT_ID: Final = "Last-Event-ID"
MAX_EVENT_NUMBER: Final = 2**53
SESSION_ID: Final = "x-session-id"
MAX_SESSION_KEY_CHARS: Final = 256
_REQUEST_ID_KEY: Final = web.RequestKey("request_id", str)
_SAFE_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.{0,128})?"
)


def request_id(request: web.BaseRequest) -> str:
    """The client's x-request-id (or x-correlation-id) when it is fit for headers and logs, else one made here."""
    known = request.get(_REQUEST_ID_KEY)
    if known is not None:
        return known
    given = request.headers.get(REQUEST_ID) or request.headers.get("x-correlation-id") or ""
    chosen = given if given and _SAFE_ID.fullmatch(given) else f"req-{os.urandom(12).hex()}"
    request[_REQUEST_ID_KEY] = chosen
    return chosen


def traceparent(request: web.BaseRequest) -> str:
    """W3C trace context to pass on; "" when there is none or it is malformed."""
    given = request.headers.get("traceparent")
    return given if given and _TRACEPARENT.fullmatch(given) else ""


def session_key(request: web.BaseRequest, prompt_cache_key: str | None) -> str:
    """What names the conversation: the body's field, else the x-session-id header, else "". Raises KvloomError
    (INVALID_ARGUMENT) for a key that is too long or not printable."""
    field, key = "prompt_cache_key", prompt_cache_key
    if not key:
        field, key = SESSION_ID, request.headers.get(SESSION_ID)
    if not key:
        return ""
    if not key.isprintable():  # nor are lone surrogates, which could not be sent on
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


def wants_resume(request: web.BaseRequest) -> bool | None:
    """What the client says about resuming its stream; None when nothing. Raises KvloomError (INVALID_ARGUMENT)."""
    given = request.headers.get(RESUME)
    if given is None:
        return None
    if given.lower() not in ("on", "off"):
        raise invalid_argument(f"{RESUME} must be on or off.", RESUME)
    return given.lower() == "on"


def idempotency_key(request: web.BaseRequest) -> str:
    """The client's name for its request; "" when it gave none. Raises KvloomError (INVALID_ARGUMENT)."""
    given = request.headers.get(IDEMPOTENCY_KEY, "")
    if given and not _SAFE_ID.fullmatch(given):
        message = f"{IDEMPOTENCY_KEY} must have at most 128 letters, digits or ._:/+=@-"
        raise invalid_argument(message, IDEMPOTENCY_KEY)
    return given


def last_event_id(request: web.BaseRequest) -> int | None:
    """The last event that the client has; None when it does not say. Raises KvloomError (INVALID_ARGUMENT)."""
    given = request.headers.get(LAST_EVENT_ID, "")
    return event_number(given, LAST_EVENT_ID) if given else None


def event_number(given: str, field: str) -> int:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    if not (given.isascii() and given.isdigit() and len(given) <= 16 and int(given) <= MAX_EVENT_NUMBER):
        raise invalid_argument(f"{field} must be the number of an event, or 0.", field)
    return int(given)


def explanation(start: SequenceStart | None) -> dict[str, str]:
    """The answer's headers that `x-kvloom-explain` asks for; none when nothing has started."""
    if start is None:
        return {}
    return {SHARD: quote(start.shard_id, safe="-._~:@"), CACHED_TOKENS: str(start.num_cached_tokens)}
