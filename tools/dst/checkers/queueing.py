"""Queued requests: no needless waiting, no starvation, a bounded queue."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence

from router.core.actions import Action, SubmitAttempt
from router.core.events import Event, Tier
from tools.dst.checker import Checker
from tools.dst.observed import ObservedRequest, State, eligible
from tools.dst.views import RouterView


class NoIdleWait(Checker):
    """No request is queued while a shard that could run it has room, nor when there is no such shard. Under a policy
    that holds requests back, it may be queued unless all shards that could run it are idle."""

    invariant = "no_idle_wait"

    def after_event(self, node: RouterView, event: Event, actions: Sequence[Action]) -> None:
        shards = node.witness.shards
        for observed in node.witness.waiting():
            able = eligible(shards, observed)
            if not able:
                if not node.config.overload.outage_patience_seconds:
                    self.fail(f"{observed.request.request_id} waits for a shard that does not exist")
                continue  # OutagePatience checks for how long it may
            if observed.request.tier is not Tier.INTERACTIVE and others_go_first(node, observed):
                continue
            if node.holds_requests:
                # A prefill chunk of its prompt may run on a shard that was suspected when there was no other.
                if observed.prefill_chunk is None and all(shard.is_idle for shard in able):
                    self.fail(f"{observed.request.request_id} waits, all of {len(able)} shards are idle")
                continue
            for shard in able:
                if node.witness.has_room(shard, observed):
                    self.fail(f"{observed.request.request_id} waits, {shard.description.shard_id} has room")


class NoStarvation(Checker):
    """Tenants are served in turn: while a tenant has a queued request that could be dispatched, every other tenant is
    served at most once before it. Not checked under a policy that holds requests back, whose queues cannot be seen."""

    invariant = "no_starvation"

    def __init__(self) -> None:
        self._num_passed: dict[tuple[RouterView, str, bool, str], int] = {}

    def on_dispatch(self, node: RouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if observed is None or node.holds_requests:
            return
        model = observed.request.model
        if observed is node.witness.arriving:
            return  # it was never queued; NoIdleWait checks that no queued request could have used its place
        if all(observed.choice(spec.index).state is State.MOVING for spec in attempt.choices):
            return  # it moves off a hung shard, and its client has begun to read
        shards = node.witness.shards
        passed: set[str] = set()
        for other in node.witness.waiting():
            tenant = other.request.tenant
            if other.request.model != model or tenant == observed.request.tenant or tenant in passed:
                continue
            if is_parked(other) is not is_parked(observed):
                continue  # they are in different queues
            if any(node.witness.has_room(shard, other) for shard in eligible(shards, other)):
                passed.add(tenant)
        parked = is_parked(observed)
        self._num_passed.pop((node, model, parked, observed.request.tenant), None)
        for tenant in passed:
            key = (node, model, parked, tenant)
            count = self._num_passed[key] = self._num_passed.get(key, 0) + 1
            if count >= len(node.tenants):
                self.fail(f"{tenant} waits on {node.name} while others were served {count} times")

    def after_event(self, node: RouterView, event: Event, actions: Sequence[Action]) -> None:
        if self._num_passed:
            waiting = {
                (node, observed.request.model, is_parked(observed), observed.request.tenant)
                for observed in node.witness.waiting()
            }
            self._num_passed = {
                key: count for key, count in self._num_passed.items() if key[0] is not node or key in waiting
            }


def is_parked(observed: ObservedRequest) -> bool:
    """Whether it is a batch request that has had no attempt."""
    return observed.request.tier is not Tier.INTERACTIVE and not observed.num_attempts


def others_go_first(node: RouterView, observed: ObservedRequest) -> bool:
    """Whether a more urgent request, or one that has had an attempt, is queued too."""
    model = observed.request.model
    others = [other for other in node.witness.waiting() if other is not observed and other.request.model == model]
    return any(other.request.tier < observed.request.tier or other.num_attempts for other in others)


class QueueBound(Checker):
    """No more requests wait for their first dispatch than the configuration allows."""

    invariant = "queue_bound"

    def after_event(self, node: RouterView, event: Event, actions: Sequence[Action]) -> None:
        num_waiting = sum(not observed.was_dispatched for observed in node.witness.waiting())
        if num_waiting > node.config.max_queued_requests:
            self.fail(
                f"{num_waiting} requests are queued on {node.name}, at most {node.config.max_queued_requests} may be"
            )
