"""Queued requests: no needless waiting, no starvation, a bounded queue."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lab.dst.checker import Checker
from lab.dst.observed import ObservedRequest, State, eligible
from lab.dst.views import SimulatedRouterView
from router.core.actions import Action, SubmitAttempt
from router.core.dispatch.idle_bound import MAX_IDLE_WAIT_SECONDS, waits_too_long
from router.core.events import Event, TierRank, class_of


class NoIdleWait(Checker):
    """No request is queued while a shard that could run it has room, nor when there is no such shard. Under a policy
    that holds requests back, it may be queued unless all shards that could run it are idle."""

    invariant = "no_idle_wait"

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        shards = node.witness.shards
        for observed in node.witness.waiting():
            able = eligible(shards, observed)
            if not able:
                if not node.witness.patience_seconds(observed) and not node.witness.keeps(observed):
                    self.fail(f"{observed.request.request_id} waits for a shard that does not exist")
                continue  # OutagePatience checks for how long it may
            if node.config.classes:
                continue  # it may be left to others, or these go first
            if observed.request.tier is not TierRank.INTERACTIVE and others_go_first(node, observed):
                continue
            if node.holds_requests:
                # A prefill chunk of its prompt may run on a shard that was suspected when there was no other.
                if observed.prefill_chunk is None and all(shard.is_idle for shard in able):
                    self.fail(f"{observed.request.request_id} waits, all of {len(able)} shards are idle")
                continue
            for shard in able:
                if node.witness.has_room(shard, observed):
                    self.fail(f"{observed.request.request_id} waits, {shard.description.shard_id} has room")


class NoWaitBesideIdle(Checker):
    """Under a policy that holds requests back, no request waits beside a shard that could run it and has nothing to do
    for longer than its first token would take there, as the router itself predicts, and MAX_IDLE_WAIT_SECONDS."""

    invariant = "no_wait_beside_idle"

    def __init__(self) -> None:
        self._since: dict[tuple[SimulatedRouterView, ObservedRequest], float] = {}
        """Since when there has always been such a shard for a request that waits."""

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        if not node.holds_requests or node.config.classes:
            return
        before = self._since
        beginning = filter(_waits_for_another, node.witness.waiting())
        waiting = {observed: idle for observed in beginning if (idle := idle_for(node, observed))}
        if before or waiting:
            self._since = {key: at for key, at in before.items() if key[0] is not node}
        for observed, idle in waiting.items():
            since = self._since[node, observed] = before.get((node, observed), node.now)
            seconds = node.now - since
            if seconds <= MAX_IDLE_WAIT_SECONDS:
                continue
            plan = node.core.plan(observed.request, node.now)
            own = [one.predicted_ttft_seconds for one in plan.shards if one.shard_id in idle]
            if own and waits_too_long(seconds, min(own)):
                name, others = observed.request.request_id, ", ".join(sorted(idle))
                self.fail(f"{name} waits for {seconds:.3f} s beside {others}, where it takes {min(own):.3f} s")


def idle_for(node: SimulatedRouterView, observed: ObservedRequest) -> set[str]:
    """Returns the ids of the shards that have nothing to do and could run the request."""
    able = eligible(node.witness.shards, observed)
    return {one.description.shard_id for one in able if one.is_idle and node.witness.has_room(one, observed)}


def _waits_for_another(observed: ObservedRequest) -> bool:
    """True for a request that an idle shard could begin instead of the one it waits for."""
    is_urgent = observed.request.tier is TierRank.INTERACTIVE
    return is_urgent and observed.prefill_chunk is None and not observed.has_begun


class _Passed(NamedTuple):
    """A request that was dispatched while another tenant waited."""

    observed: ObservedRequest
    num_emitted: int
    """Tokens that it had before."""
    num_prefill_tokens: int
    """The tokens of its prompt that were to be computed; 0 if it had run before."""


class NoStarvation(Checker):
    """Tenants are served by how little service they have had: while a tenant has a queued request that could be
    dispatched, no other of its class is served more than a bound before it. The bound is the most that requests of the
    waiting tenant could have been served in advance, because they ran at one time, and what an engine's step or two may
    add unseen. Not checked under a policy that holds requests back, whose queues cannot be seen."""

    invariant = "no_starvation"

    def __init__(self) -> None:
        self._passed: dict[_Pair, list[_Passed]] = {}
        self._most_ahead: dict[tuple[SimulatedRouterView, str], float] = {}
        """By tenant: what its requests that ran at one time could be served at most."""

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if observed is None or node.holds_requests:
            return
        self._note_running(node, observed, attempt)
        if observed is node.witness.arriving:
            return  # it was never queued; NoIdleWait checks that no queued request could have used its place
        if all(observed.choice(spec.index).state is State.MOVING for spec in attempt.choices):
            return  # it moves off a hung shard, and its client has begun to read
        request, parked = observed.request, is_parked(observed)
        name, shards = class_of(request).name, node.witness.shards
        able: set[str] = set()
        for other in node.witness.waiting():
            tenant = other.request.tenant
            if other.request.model != request.model or tenant == request.tenant or tenant in able:
                continue
            if is_parked(other) is not parked or class_of(other.request).name != name:
                continue  # they are in different queues, or not of one class
            if any(node.witness.has_room(shard, other) for shard in eligible(shards, other)):
                able.add(tenant)
        turn = _Turn(node, request.model, parked, name)
        for key in [key for key in self._passed if key.turn == turn and key.waits == request.tenant]:
            del self._passed[key]  # it has been served
        num_prefill = len(request.prompt_token_ids) - attempt.num_expected_cached_tokens
        passed = _Passed(observed, _num_emitted(observed), 0 if observed.num_attempts else max(1, num_prefill))
        for tenant in able:
            entries = self._passed.setdefault(_Pair(turn, tenant, request.tenant), [])
            bound = self._most_ahead.get((node, tenant), 0.0) + 4 * sum(len(one.observed.choices) for one in entries)
            service = sum(
                one.num_prefill_tokens + 2 * (_num_emitted(one.observed) - one.num_emitted) for one in entries
            )
            if service > bound and len(entries) >= len(node.tenants):
                self.fail(f"{tenant} waits on {node.name} while {request.tenant} was served {service:g}")
            entries.append(passed)

    def _note_running(self, node: SimulatedRouterView, observed: ObservedRequest, attempt: SubmitAttempt) -> None:
        tenant = observed.request.tenant
        running = [
            other
            for other in node.witness.live.values()
            if other.request.tenant == tenant and any(choice.state is State.RUNNING for choice in other.choices)
        ]
        ahead = sum(_most_service(other, attempt.max_tokens) for other in {*running, observed})
        self._most_ahead[node, tenant] = max(self._most_ahead.get((node, tenant), 0.0), ahead)

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        if self._passed:
            waiting = {
                (_Turn(node, one.request.model, is_parked(one), class_of(one.request).name), one.request.tenant)
                for one in node.witness.waiting()
            }
            self._passed = {
                key: passed
                for key, passed in self._passed.items()
                if key.turn.node is not node or (key.turn, key.waits) in waiting
            }


class _Turn(NamedTuple):
    """Requests among which the one of the tenant with least service is next."""

    node: SimulatedRouterView
    model: str
    parked: bool
    priority_class: str


class _Pair(NamedTuple):
    turn: _Turn
    waits: str
    """The tenant that waits."""
    served: str
    """The tenant that is served meanwhile."""


def _num_emitted(observed: ObservedRequest) -> int:
    return sum(len(choice.emitted) for choice in observed.choices)


def _most_service(observed: ObservedRequest, max_tokens: int) -> float:
    num_output = sum(choice.limit or max_tokens for choice in observed.choices)
    return len(observed.request.prompt_token_ids) + 2.0 * num_output


def is_parked(observed: ObservedRequest) -> bool:
    """True when it is a batch request that has had no attempt and no leg."""
    return observed.request.tier is not TierRank.INTERACTIVE and not observed.has_begun


def others_go_first(node: SimulatedRouterView, observed: ObservedRequest) -> bool:
    """True when a more urgent request, or one that has had an attempt, is queued too."""
    model = observed.request.model
    others = [other for other in node.witness.waiting() if other is not observed and other.request.model == model]
    return any(other.request.tier < observed.request.tier or other.has_begun for other in others)


class QueueBound(Checker):
    """No more requests wait for their first dispatch than the configuration allows."""

    invariant = "queue_bound"

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        num_waiting = sum(not observed.was_dispatched for observed in node.witness.waiting())
        if num_waiting > node.config.max_queued_requests:
            self.fail(
                f"{num_waiting} requests are queued on {node.name}, at most {node.config.max_queued_requests} may be"
            )
