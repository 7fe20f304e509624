"""Request headers that mean something here, and the ones that every answer carries."""

from __future__ import annotations

import re
import secrets
from typing import Final

from aiohttp import web

REQUEST_ID: Final = "x-request-id"
DETAILS: Final = "x-kvloom-details"
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
    chosen = given if _SAFE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
    request[_REQUEST_ID_KEY] = chosen
    return chosen


def traceparent(request: web.BaseRequest) -> str:
    """W3C trace context to pass on; "" when there is none or it is malformed."""
    given = request.headers.get("traceparent", "")
    return given if _TRACEPARENT.fullmatch(given) else ""


def wants_details(request: web.BaseRequest) -> bool:
    return request.headers.get(DETAILS, "").lower() == "true"
