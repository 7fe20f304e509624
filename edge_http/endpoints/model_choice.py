"""Gives the choice of a model by a route what it needs of an HTTP request, and tells its client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol
from urllib.parse import quote

import msgspec
from aiohttp import web

from edge_http.anthropic.blocks import MessageBlock, kind_of
from edge_http.edge import Edge
from edge_http.wire.headers import MODEL, ROUTE, session_key
from edge_http.wire.request_headers import headers_of
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.models.model_routes import FALLBACK_REASONS, ChosenRoute

IMAGE_KINDS: Final = ("image_url", "input_image", "image")
"""In chat completions, the Responses API and Anthropic's API."""


class NamesModels(Protocol):
    """The fields by which every body names its model."""

    model: str
    models: list[str] | None
    """Those to fall back to, in order."""


def share_key(edge: Edge, request: web.BaseRequest, body: Any) -> str:
    """Returns what stays with one target of a weighted route: the session, or else the caller."""
    session = session_key(request, getattr(body, "prompt_cache_key", None))
    return session or edge.callers.caller_of(request)


def last_user_text(messages: Sequence[Any]) -> str:
    """The text of the last message of the user, in the form of any API; "" if there is none."""
    for message in reversed(messages):
        if isinstance(message, msgspec.Raw):
            message = msgspec.json.decode(message)
        if _field(message, "role") == "user":
            content = _field(message, "content")
            if isinstance(content, str):
                return content
            texts = (_field(part, "text") for part in content or ())
            return "".join(text for text in texts if isinstance(text, str))
    return ""


def has_images(messages: Sequence[Any]) -> bool:
    """True when the message by which the new turn asks for something, in the form of any API, has an image. The model
    decides if it can be read. Images of the history are left out for one that cannot."""
    seen = [msgspec.json.decode(message) if isinstance(message, msgspec.Raw) else message for message in messages[-1:]]
    if not seen or _field(seen[0], "role") != "user":
        return False
    content = _field(seen[0], "content")
    return isinstance(content, list) and any(_kind(part) in IMAGE_KINDS for part in content)


def _kind(part: Any) -> Any:
    return kind_of(part) if isinstance(part, MessageBlock) else _field(part, "type")


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def outlives_connection(edge: Edge, request: web.BaseRequest, *, is_stream: bool) -> bool:
    """True when the answer belongs to a task of its own from its submission on. Its name, by which it is resumed or
    repeated, then stands for this one model."""
    asked = headers_of(request)
    return bool(asked.idempotency_key) or (is_stream and edge.resume.is_wanted(asked.resume))


def pass_on(passed: list[tuple[str, KvloomError]], name: str, error: KvloomError) -> None:
    """Note that a model could not take the request, and why. Raises the error if another model would not do better."""
    if error.reason not in FALLBACK_REASONS:
        raise error
    passed.append((name, error))


def route_headers(
    chosen: ChosenRoute,
    model: str,
    passed: Sequence[tuple[str, KvloomError]],
    discarded: Sequence[tuple[str, str]] = (),
) -> Mapping[str, str]:
    """The model that answers, and how it was chosen: `auto;rule=2;target=small;passed=small:queue_full`, or after a
    cascade `chat;cascade=small:refusal;target=large`."""
    how = chosen.how
    if discarded:
        how = f"{chosen.start};cascade={','.join(map(':'.join, discarded))};target={model}"
    if passed:
        skipped = ",".join(f"{name}:{_reason(error)}" for name, error in passed)
        how += f";passed={skipped}"
    return {MODEL: quote(model, safe=_SHOWN), ROUTE: quote(how, safe=_SHOWN + ";=,")}


_SHOWN: Final = "-._~:@/"


def _reason(error: KvloomError) -> str:
    return ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_").lower()
