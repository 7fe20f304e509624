"""Which failures the faults of the time explain. What they do not explain is a fault of kvloom. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from tools.chaos.checker import NEVER_ALLOWED, Finding, Verdict
from tools.chaos.clients.questions import Door, Errand, Manner
from tools.chaos.clients.transcript import End, Transcript
from tools.chaos.injection.faults import FaultKind


@dataclasses.dataclass(slots=True)
class Disturbance:
    """A fault that struck. Times are of the monotonic clock."""

    kind: FaultKind
    target: str
    """The process's name; of links the shard's or the door's."""
    began_at: float
    ended_at: float | None = None
    """When the part was there again. None: not yet."""

    def is_felt(self, begin: float, end: float) -> bool:
        """At any time in between."""
        return self.began_at <= end and (self.ended_at is None or begin <= self.ended_at + SETTLE_SECONDS)


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    num_edges: int
    num_routers: int
    num_shards: int
    max_attempts: int
    """`router.max_attempts`"""


SETTLE_SECONDS: Final = 3.0
"""Until the others have found a part that is back."""
_ALL_SHARDS: Final = frozenset({"no_shard_ready", "shard_lost", "queue_timeout", "queue_full"})
_LOST_ROUTER: Final = frozenset({"router_unavailable", "no_shard_ready", "model_not_found", "draining", "queue_full"})
_LOST_EVENTS: Final = frozenset({"not_found", "events_gone"})
_OWN_FAULT: Final = frozenset({"client_too_slow"})
_EDGE_VERBS: Final = frozenset({"kill", "stop", "reset"})
"""What breaks a connection. An edge that only hangs keeps its connections."""


def is_excused(
    errand: Errand, seen: Transcript, finding: Finding, disturbances: Sequence[Disturbance], fleet: Fleet
) -> bool:
    """Whether this answer may have ended like this. `disturbances`: of the whole run. Planned restarts excuse
    nothing."""
    if finding.verdict in NEVER_ALLOWED:
        return False
    by_part: dict[str, list[Disturbance]] = {}
    restarted: dict[str, set[str]] = {}
    for one in disturbances:
        if not one.is_felt(seen.sent_at, seen.ended_at):
            continue
        if one.kind.verb == "restart":
            restarted.setdefault(one.kind.part, set()).add(one.target)
        else:
            by_part.setdefault(one.kind.part, []).append(one)
    if seen.num_takeovers and not any(one.kind.verb == "hang" for one in by_part.get("edge", [])):
        return False  # only an edge that wakes up can find a stream elsewhere that its own client has come back for
    if finding.verdict in (Verdict.OK, Verdict.LEFT):
        return True
    no_router = _is_none_left(by_part.get("router", []), restarted.get("router", set()), fleet.num_routers)
    is_taken_up = errand.manner in (Manner.RESUMABLE, Manner.FLAKY) and not _is_sdk(errand)
    if seen.end is End.BROKEN:
        # The SDK goes on at another router; a stream that can be taken up, at another edge.
        return no_router if _is_sdk(errand) else not is_taken_up and _breaks_connections(by_part)
    if seen.end is End.UNREACHABLE:
        return "edge" in by_part or "clients" in by_part
    code = seen.code
    if code in _OWN_FAULT:
        return errand.manner is Manner.SLOW or "clients" in by_part
    if code in _LOST_ROUTER and no_router:
        return True
    if code == "no_shard_ready" and "redis" in by_part and len(by_part) > 1:
        return True  # a part that comes back while Redis is away cannot find the others
    if code == "safety_unavailable":
        return "safety" in by_part or "router" in by_part
    if code == "draining" and _breaks_connections(by_part):
        return True
    if code in _LOST_EVENTS:
        # Another edge goes on with what the dead one had, if that could be written down.
        return (
            is_taken_up and "redis" in by_part and any(one.kind.verb in _EDGE_VERBS for one in by_part.get("edge", []))
        )
    if code == "internal_error":
        return is_taken_up and "edge" in by_part and "redis" in by_part
    if code not in _ALL_SHARDS:
        return False
    struck = by_part.get("shard", []) + by_part.get("link", [])
    attempts_used_up = len(struck) >= fleet.max_attempts
    return attempts_used_up or _is_none_left(struck, restarted.get("shard", set()), fleet.num_shards)


def _is_sdk(errand: Errand) -> bool:
    return errand.door in (Door.SDK_TEXT, Door.SDK_TOKENS)


def _breaks_connections(by_part: dict[str, list[Disturbance]]) -> bool:
    return any(one.kind.verb in _EDGE_VERBS for one in by_part.get("edge", []) + by_part.get("clients", []))


def _is_none_left(struck: Sequence[Disturbance], restarted: set[str], count: int) -> bool:
    """All were struck, or all others while one was being restarted."""
    targets = {one.target for one in struck}
    return bool(targets) and len(targets | restarted) >= count
