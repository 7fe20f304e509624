"""Decides whether the faults of the time explain a failure. A failure that they do not explain is a bug of kvloom. Pure
functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from lab.chaos.checking.verdicts import NEVER_ALLOWED, AnswerVerdict, Finding
from lab.chaos.clients.questions import Behaviour, Endpoint, UserCall
from lab.chaos.clients.transcript import AnswerEnd, Transcript
from lab.chaos.fabric.faults import Disturbance, FaultKind
from router.core.relay.lifecycle import MAX_STRIKES


@dataclasses.dataclass(frozen=True, slots=True)
class FleetSize:
    """How many parts there are to lose."""

    num_edges: int
    num_routers: int
    num_shards: int
    """The number of shards of each model."""
    max_attempts: int
    """`router.max_attempts`"""
    model_of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The models of shards, by name. It may be empty if there is only one."""


_ALL_SHARDS: Final = frozenset({"no_shard_ready", "shard_lost", "queue_timeout", "queue_full", "request_quarantined"})
_LOST_ROUTER: Final = frozenset({"router_unavailable", "no_shard_ready", "model_not_found", "draining", "queue_full"})
_LOST_EVENTS: Final = frozenset({"not_found", "events_gone"})
_WITHOUT_CONTROL: Final = frozenset({"budget_unavailable", "auth_unavailable", "invalid_api_key"})
"""The last: of a key that is newer than what an edge knows."""
_CAUSED_BY_CLIENT: Final = frozenset({"client_too_slow"})
_WITHOUT_STORAGE: Final = frozenset({"orchestrator", "redis", "disk-full"})
"""The parts without which responses are not stored."""
_EDGE_VERBS: Final = frozenset({"kill", "stop", "reset"})
"""The faults that break a connection. An edge that only hangs keeps its connections."""


def is_explained(
    call: UserCall, transcript: Transcript, finding: Finding, disturbances: Sequence[Disturbance], fleet: FleetSize
) -> bool:
    """True when this answer may have ended like this. `disturbances` are those of the whole run. Planned restarts
    explain no failure, nor does what happens to shards of other models."""
    if finding.verdict in NEVER_ALLOWED:
        return False
    model = call.question.model
    by_part: dict[str, list[Disturbance]] = {}
    restarted: dict[str, set[str]] = {}
    for one in disturbances:
        if not one.is_felt(transcript.sent_at, transcript.ended_at) or _model_struck(one, fleet) not in ("", model):
            continue
        if one.kind.verb == "restart":
            restarted.setdefault(one.kind.part, set()).add(one.target)
        else:
            by_part.setdefault(one.kind.part, []).append(one)
    if transcript.num_takeovers and not any(one.kind.verb == "hang" for one in by_part.get("edge", [])):
        return False  # only an edge that wakes up can find that its client has resumed a stream elsewhere
    if finding.verdict in (AnswerVerdict.OK, AnswerVerdict.LEFT):
        return True
    no_router = _is_none_left(by_part.get("router", []), restarted.get("router", set()), fleet.num_routers)
    is_resumable = call.behaviour in (Behaviour.RESUMABLE, Behaviour.FLAKY) and not _is_sdk(call)
    if transcript.end is AnswerEnd.BROKEN:
        # The SDK continues at another router, and a resumable stream at another edge.
        return no_router if _is_sdk(call) else not is_resumable and _breaks_connections(by_part)
    if transcript.end is AnswerEnd.UNREACHABLE:
        return "edge" in by_part or "clients" in by_part
    code = transcript.code
    if code in transcript.refusal_codes or (code in _WITHOUT_CONTROL and "control" in by_part):
        return True
    if code == "orchestrator_unavailable":
        return not _WITHOUT_STORAGE.isdisjoint(by_part)
    if _is_refused_for_its_model(transcript, by_part):
        return True
    if code in _CAUSED_BY_CLIENT:
        return call.behaviour is Behaviour.SLOW or "clients" in by_part
    if code in _LOST_ROUTER and no_router:
        return True
    if code == "no_shard_ready" and "redis" in by_part and len(by_part) > 1:
        return True  # a part that restarts while Redis is down cannot find the others
    if code == "safety_unavailable":
        return "safety" in by_part or "router" in by_part
    if code == "draining" and _breaks_connections(by_part):
        return True
    if call.endpoint is Endpoint.RESPONSE and code in _LOST_EVENTS:
        return False
    if code in _LOST_EVENTS and any(one.kind is FaultKind.REDIS_TAKEOVER for one in by_part.get("redis", [])):
        return is_resumable  # two edges may be with different servers, which do not know each other's journals
    if code in _LOST_EVENTS:
        # Another edge continues a stream of a dead one if the dead one could write its journal.
        return (
            is_resumable and "redis" in by_part and any(one.kind.verb in _EDGE_VERBS for one in by_part.get("edge", []))
        )
    if code == "response_unavailable":
        return is_resumable and "edge" in by_part and "redis" in by_part
    if code not in _ALL_SHARDS:
        return False
    struck = by_part.get("shard", []) + by_part.get("link", [])
    attempts_used_up = len(struck) >= (MAX_STRIKES if code == "request_quarantined" else fleet.max_attempts)
    return attempts_used_up or _is_none_left(struck, restarted.get("shard", set()), fleet.num_shards)


def _model_struck(disturbance: Disturbance, fleet: FleetSize) -> str:
    """The only model whose requests the disturbance concerns; "" if it may concern all."""
    if disturbance.kind.part == "model":
        return disturbance.target
    return fleet.model_of.get(disturbance.target, "") if disturbance.kind.part in ("shard", "link") else ""


def _is_refused_for_its_model(transcript: Transcript, by_part: dict[str, list[Disturbance]]) -> bool:
    """True when nothing was delivered because the model was unloaded or asleep. That breaks no answer that runs."""
    if transcript.first_at is not None:
        return False
    for one in by_part.get("model", []):
        if transcript.code == "no_shard_ready":
            return True
        if transcript.code == "model_not_found" and (one.kind.verb == "unload" or "shard" in by_part):
            return True  # a model whose shards have all died is as unknown as one that was unloaded
    return False


def _is_sdk(call: UserCall) -> bool:
    return call.endpoint in (Endpoint.SDK_TEXT, Endpoint.SDK_TOKENS)


def _breaks_connections(by_part: dict[str, list[Disturbance]]) -> bool:
    return any(one.kind.verb in _EDGE_VERBS for one in by_part.get("edge", []) + by_part.get("clients", []))


def _is_none_left(struck: Sequence[Disturbance], restarted: set[str], count: int) -> bool:
    """True when all parts were struck, counting those that were being restarted."""
    targets = {one.target for one in struck}
    return bool(targets) and len(targets | restarted) >= count
