"""What waits in a router: not in vain, in turns, and not too much."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from router.core.actions import Action, SubmitAttempt
from router.core.events import Event, Tier
from tools.dst.checkers.base import Checker
from tools.dst.witness.seen import State, eligible

if TYPE_CHECKING:
    from tools.dst.nodes.router_node import RouterNode
    from tools.dst.witness.seen import SeenRequest


class NoIdleWait(Checker):
    """No request waits while a shard that could run it has room, or although no shard ever could. Under a policy that
    holds requests back: not while all that could run it are idle."""

    invariant = "no_idle_wait"

    def after_event(self, node: RouterNode, event: Event, actions: Sequence[Action]) -> None:
        shards = node.witness.shards
        for seen in node.witness.waiting():
            able = eligible(shards, seen)
            if not able:
                if not node.config.overload.outage_patience_seconds:
                    self.fail(f"{seen.request.request_id} waits for a shard that does not exist")
                continue  # how long it may is looked at by OutagePatience
            if seen.request.tier is not Tier.INTERACTIVE and others_go_first(node, seen):
                continue
            if node.holds_requests:
                # A prefill chunk of its prompt may be computed on a shard that was suspected when there was no other.
                if seen.prefill_chunk is None and all(shard.is_idle for shard in able):
                    self.fail(f"{seen.request.request_id} waits, all of {len(able)} shards are idle")
                continue
            for shard in able:
                if shard.has_room:
                    self.fail(f"{seen.request.request_id} waits, {shard.description.shard_id} has room")


class NoStarvation(Checker):
    """Tenants take turns: while a tenant waits and could be served, it is passed over at most once by every other
    tenant. Not judged under a policy that holds requests back: there they wait in lines of which nothing is seen."""

    invariant = "no_starvation"

    def __init__(self) -> None:
        self._num_passed: dict[tuple[RouterNode, str, bool, str], int] = {}

    def on_dispatch(self, node: RouterNode, seen: SeenRequest | None, attempt: SubmitAttempt) -> None:
        if seen is None or node.holds_requests:
            return
        model = seen.request.model
        if seen is node.witness.arriving:
            return  # it never waited: what it takes, nobody who waits can use, or NoIdleWait would have said so
        if all(seen.choice(spec.index).state is State.MOVING for spec in attempt.choices):
            return  # it is moved off a shard that hangs: its client has begun to read
        shards = node.witness.shards
        passed: set[str] = set()
        for other in node.witness.waiting():
            tenant = other.request.tenant
            if other.request.model != model or tenant == seen.request.tenant or tenant in passed:
                continue
            if is_parked(other) is not is_parked(seen):
                continue  # they stand in lines of their own
            if any(shard.has_room for shard in eligible(shards, other)):
                passed.add(tenant)
        line = is_parked(seen)
        self._num_passed.pop((node, model, line, seen.request.tenant), None)
        for tenant in passed:
            key = (node, model, line, tenant)
            count = self._num_passed[key] = self._num_passed.get(key, 0) + 1
            if count >= len(node.tenants):
                self.fail(f"{tenant} waits on {node.name} while others were served {count} times")

    def after_event(self, node: RouterNode, event: Event, actions: Sequence[Action]) -> None:
        if self._num_passed:
            waiting = {
                (node, seen.request.model, is_parked(seen), seen.request.tenant) for seen in node.witness.waiting()
            }
            self._num_passed = {
                key: count for key, count in self._num_passed.items() if key[0] is not node or key in waiting
            }


def is_parked(seen: SeenRequest) -> bool:
    """It can wait, and nothing of it has run."""
    return seen.request.tier is not Tier.INTERACTIVE and not seen.num_attempts


def others_go_first(node: RouterNode, seen: SeenRequest) -> bool:
    """Somebody more urgent waits, or somebody who has run."""
    model = seen.request.model
    others = [other for other in node.witness.waiting() if other is not seen and other.request.model == model]
    return any(other.request.tier < seen.request.tier or other.num_attempts for other in others)


class QueueBound(Checker):
    """No more requests wait for their first dispatch than the configuration allows."""

    invariant = "queue_bound"

    def after_event(self, node: RouterNode, event: Event, actions: Sequence[Action]) -> None:
        num_waiting = sum(not seen.was_dispatched for seen in node.witness.waiting())
        if num_waiting > node.config.max_queued_requests:
            self.fail(f"{num_waiting} requests wait on {node.name}, {node.config.max_queued_requests} may")
