"""The class of a request (docs/concepts/scheduling.md): what its headers or its service tier say."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from aiohttp import web

from edge_http.edge import BUILT_IN_CLASSES, Edge
from edge_http.wire.headers import FAIRNESS_ID, OBJECTIVE, PRIORITY_CLASS
from kvloom.errors import invalid_argument
from kvloom.v1.router_service_pb2 import TIER_BATCH, TIER_INTERACTIVE, Tier
from kvloom_common.access.caller_access import check_class
from kvloom_common.tenancy.principal import Principal

MAX_FAIRNESS_ID_CHARS: Final = 256


class ServedClass(NamedTuple):
    name: str
    fairness_id: str

    @property
    def headers(self) -> dict[str, str]:
        """Those of the response."""
        return {PRIORITY_CLASS: self.name}


def served_class(
    edge: Edge, request: web.BaseRequest, tier: Tier.ValueType = TIER_INTERACTIVE, service_tier: str = ""
) -> ServedClass | None:
    """The class with which the request is to be served; None: nothing is said of classes, so the router decides by the
    tier. Raises KvloomError (INVALID_ARGUMENT, PERMISSION_DENIED)."""
    given = request.headers
    principal = edge.callers.principal_of(request)
    if principal is not None and not principal.classes:
        principal = None
    is_named = PRIORITY_CLASS in given or OBJECTIVE in given or FAIRNESS_ID in given
    if not (is_named or edge.class_names or principal is not None):
        return None
    name = priority_class_of(request, tier, service_tier, edge.class_names, principal)
    return ServedClass(name, fairness_id_of(request))


def priority_class_of(
    request: web.BaseRequest,
    tier: Tier.ValueType,
    service_tier: str,
    declared: Collection[str],
    principal: Principal | None = None,
) -> str:
    """The name of the request's class. A service tier names the declared class of its name. `principal`: the caller,
    whose classes are limited; None: they are not. Raises KvloomError (INVALID_ARGUMENT, PERMISSION_DENIED)."""
    name, field = _named_class(request, tier, service_tier, declared)
    if principal is not None:
        name = name or principal.default_class
        check_class(principal, name or "interactive", field)
    if name and name not in (declared or BUILT_IN_CLASSES):
        raise invalid_argument(f"{field}: there is no class {name[:64]!r}.", field)
    return name or "interactive"


def _named_class(
    request: web.BaseRequest, tier: Tier.ValueType, service_tier: str, declared: Collection[str]
) -> tuple[str, str]:
    """The class that the request names ("": none), and the header or field that does, or would."""
    for header in (PRIORITY_CLASS, OBJECTIVE):
        name = request.headers.get(header)
        if name is not None:
            if not name:
                raise invalid_argument(f"{header}: there is no class ''.", header)
            return name, header
    if service_tier in declared:
        return service_tier, "service_tier"
    return ("batch", "service_tier") if tier == TIER_BATCH else ("", PRIORITY_CLASS)


def fairness_id_of(request: web.BaseRequest) -> str:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    given = request.headers.get(FAIRNESS_ID, "")
    if len(given) > MAX_FAIRNESS_ID_CHARS:
        raise invalid_argument(f"{FAIRNESS_ID} must have at most {MAX_FAIRNESS_ID_CHARS} characters.", FAIRNESS_ID)
    return given
