"""Decides which processes of a fabric may call what, by the role that their certificates name.

Who has stolen the certificate of one process, which ends with the process, can do with it what that process may: a
shard answers the prompts that routers send to it, and calls no other process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

CONTROL: Final = "control"
EDGE: Final = "edge"
ORCHESTRATOR: Final = "orchestrator"
ROUTER: Final = "router"
SAFETY: Final = "safety"
SHARD: Final = "shard"
SUPERVISOR: Final = "supervisor"
TOOLS: Final = "tools"
"""Commands of the operator."""

_OPERATORS: Final = frozenset({SUPERVISOR, TOOLS})
_ALL: Final = frozenset({CONTROL, EDGE, ORCHESTRATOR, ROUTER, SAFETY, SHARD, SUPERVISOR, TOOLS})

CALLERS: Final[Mapping[str, frozenset[str]]] = {
    "edge/HTTP": _OPERATORS | {EDGE, ORCHESTRATOR},
    "edge/on-behalf": frozenset({EDGE, ORCHESTRATOR}),
    "grpc.health.v1.Health": _ALL,
    "grpc.reflection.v1alpha.ServerReflection": _ALL,
    "kvloom.v1.ControlService/Follow": _OPERATORS | {EDGE, ROUTER},
    "kvloom.v1.ControlService/LeaseBudgets": frozenset({ROUTER}),
    "kvloom.v1.ControlService/ReportKeyUses": frozenset({EDGE, ROUTER}),
    "kvloom.v1.DirectoryService": _OPERATORS | {EDGE},
    "kvloom.v1.ModelCardService": _OPERATORS | {EDGE, ROUTER},
    "kvloom.v1.OrchestratorService": _OPERATORS | {EDGE},
    "kvloom.v1.OverviewService": _OPERATORS | {EDGE},
    "kvloom.v1.RouterService": _OPERATORS | {EDGE, ROUTER},
    "kvloom.v1.RouterService/ClearResultCache": _OPERATORS,
    "kvloom.v1.SafetyService": frozenset({ROUTER, TOOLS}),
    "kvloom.v1.ShardService": _OPERATORS,
    "kvloom.v1.ShardService/Connect": _OPERATORS | {ROUTER},
    "kvloom.v1.ShardService/GetInfo": _OPERATORS | {ROUTER},
    "kvloom.v1.SupervisorService": _OPERATORS,
    "kvloom.v1.UsageService": _OPERATORS | {EDGE},
}
"""By method, or else by service. What is not named here is refused. "edge/HTTP": the port of an edge for its fabric."""


def may_call(method: str, roles: Iterable[str]) -> bool:
    """`method` is "SERVICE/METHOD"."""
    allowed = CALLERS.get(method) or CALLERS.get(method.partition("/")[0], frozenset())
    return not allowed.isdisjoint(roles)


def roles_of(names: Iterable[bytes], fabric_id: str) -> frozenset[str]:
    """The roles in the names of a certificate, of which TLS has verified that this fabric has made it."""
    end = f".{fabric_id}.kvloom"
    found = (name.decode("ascii", "replace") for name in names)
    return frozenset(name.removesuffix(end) for name in found if name.endswith(end)) & _ALL


def names_in(peer_certificate: Mapping[str, Any] | None) -> list[bytes]:
    """The names in a certificate as Python's ssl module shows it."""
    shown = (peer_certificate or {}).get("subjectAltName", ())
    return [name.encode() for kind, name in shown if kind == "DNS"]


def shown_names(context: Any) -> list[bytes] | None:
    """Those in the certificate of the peer of a gRPC call; None if the connection has no TLS, as over a local socket,
    which only this user reaches."""
    shown: Mapping[str, Iterable[bytes]] = context.auth_context()
    if b"ssl" not in shown.get("transport_security_type", ()):
        return None
    return list(shown.get("x509_subject_alternative_name", ()))
