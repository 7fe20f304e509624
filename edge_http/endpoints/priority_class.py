"""The class of a request (docs/scheduling.md): what its headers or its service tier say."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from aiohttp import web

from kvloom.errors import invalid_argument
from kvloom.v1.router_service_pb2 import TIER_BATCH, Tier

PRIORITY_CLASS: Final = "x-kvloom-priority-class"
"""In a request: its class. In a response: the class with which it was served."""
OBJECTIVE: Final = "x-llm-d-inference-objective"
"""The same, as clients of llm-d name it."""
FAIRNESS_ID: Final = "x-llm-d-inference-fairness-id"
"""Divides the caller's own requests into sub-flows; it is never the identity of another caller."""
BUILT_IN_CLASSES: Final = frozenset({"interactive", "batch"})
MAX_FAIRNESS_ID_CHARS: Final = 256


def priority_class_of(
    request: web.BaseRequest, tier: Tier.ValueType, service_tier: str, declared: Collection[str]
) -> str:
    """The name of the request's class. A service tier names the declared class of its name. Raises KvloomError
    (INVALID_ARGUMENT)."""
    known = declared or BUILT_IN_CLASSES
    for header in (PRIORITY_CLASS, OBJECTIVE):
        name = request.headers.get(header)
        if name is not None:
            if name not in known:
                raise invalid_argument(f"{header}: there is no class {name[:64]!r}.", header)
            return name
    if service_tier in declared:
        return service_tier
    return "batch" if tier == TIER_BATCH else "interactive"


def fairness_id_of(request: web.BaseRequest) -> str:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    given = request.headers.get(FAIRNESS_ID, "")
    if len(given) > MAX_FAIRNESS_ID_CHARS:
        raise invalid_argument(f"{FAIRNESS_ID} must have at most {MAX_FAIRNESS_ID_CHARS} characters.", FAIRNESS_ID)
    return given
