"""Overload: which requests are rejected, which go first, and how long an outage is tolerated."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvloom.v1.error_reason_pb2 import ErrorReason
from lab.dst.checker import Checker
from lab.dst.checkers.queueing import idle_for
from lab.dst.observed import ObservedChoice, ObservedRequest, State, eligible
from lab.dst.views import SimulatedRouterView
from lab.dst.witness import GIVEN_UP
from router.core.actions import Action, SubmitAttempt
from router.core.events import DrainEnded, Event, RequestArrived, Tick, TierRank
from router.core.frames import Finish


class RejectionsJustified(Checker):
    """No request is rejected for overload while the queue is empty and a shard is idle. Under a policy that holds
    requests back the queue alone counts."""

    invariant = "rejections_justified"

    def __init__(self) -> None:
        self._would_fit = False

    def before_event(self, node: SimulatedRouterView, event: Event) -> None:
        self._would_fit = False
        if isinstance(event, RequestArrived):
            model = event.request.model
            waiting = node.witness.waiting()
            shards = [s for s in node.witness.shards.values() if s.description.model == model and not s.is_draining]
            self._would_fit = (
                len(waiting) < node.config.max_queued_requests
                and not any(observed.request.model == model for observed in waiting)
                and (node.holds_requests or any(shard.is_idle for shard in shards))
            )

    def on_finish(self, node: SimulatedRouterView, choice: ObservedChoice, finish: Finish) -> None:
        if choice.request.may_be_impossible:  # there may be room, but not in time
            return
        if self._would_fit and choice.request is node.witness.arriving and _reason(finish) == _FULL:
            self.fail(f"{choice.request.request.request_id} was rejected, but there was room for it")


class NoRefusalBesideIdle(Checker):
    """No request that arrives is rejected for overload while a shard that could run it has nothing to do, whatever
    waits for others."""

    invariant = "no_refusal_beside_idle"

    def on_finish(self, node: SimulatedRouterView, choice: ObservedChoice, finish: Finish) -> None:
        observed, witness = choice.request, node.witness
        if observed is not witness.arriving or _reason(finish) != _FULL or observed.may_be_impossible:
            return
        if observed.request.tier is not TierRank.INTERACTIVE:
            return
        if idle := idle_for(node, observed):
            self.fail(f"{observed.request.request_id} was rejected beside {min(idle)}, which is idle")


class TiersKept(Checker):
    """A batch request is not dispatched while an interactive one is queued, and gives up its place in the queue to it.
    Under a policy that holds requests back only the latter is checked, because the queues of the shards cannot be seen
    from outside."""

    invariant = "tiers_kept"

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if (
            observed is None
            or observed.request.tier is TierRank.INTERACTIVE
            or node.config.classes
            or observed.has_begun
            or node.holds_requests
        ):
            return
        if observed is not node.witness.arriving and self._waiting(node, observed, TierRank.INTERACTIVE):
            self.fail(
                f"{observed.request.request_id}, a batch request, is dispatched while an interactive one is queued"
            )

    def on_finish(self, node: SimulatedRouterView, choice: ObservedChoice, finish: Finish) -> None:
        observed = choice.request
        if (
            node.config.classes
            or _reason(finish) != _FULL
            or observed.num_attempts
            or observed.request.tier is not TierRank.INTERACTIVE
        ):
            return
        if observed is node.witness.arriving and (node.config.overload.sheds_load_early or observed.may_be_impossible):
            return  # it may have had to wait too long even with a place in the queue
        others = [other for other in node.witness.waiting() if other.request.tier is TierRank.BATCH]
        if others and not any(other.was_dispatched for other in node.witness.waiting()):
            self.fail(
                f"{observed.request.request_id} is rejected while the batch request "
                f"{others[0].request.request_id} is queued"
            )

    @staticmethod
    def _waiting(node: SimulatedRouterView, observed: ObservedRequest, tier: TierRank) -> bool:
        model = observed.request.model
        return any(other.request.tier is tier and other.request.model == model for other in node.witness.waiting())


class OutagePatience(Checker):
    """A request for which there is no shard fails when the patience with outages is over, and not before. A new one is
    not refused for that reason if it may wait for the first shard of its model."""

    invariant = "outage_patience"

    def __init__(self) -> None:
        self._since: dict[tuple[SimulatedRouterView, ObservedRequest], float] = {}
        """Since when there has been no shard for a request."""

    def on_finish(self, node: SimulatedRouterView, choice: ObservedChoice, finish: Finish) -> None:
        observed, witness = choice.request, node.witness
        is_refused = observed is witness.arriving and _reason(finish) == ErrorReason.ERROR_REASON_NO_SHARD_READY
        if is_refused and witness.may_wait_for_start(observed.request.model):
            self.fail(f"{observed.request.request_id} was refused, but may wait for a shard to start")
        patience_seconds = witness.patience_seconds(observed)
        if choice.state is not State.WAITING or observed is witness.arriving or _reason(finish) not in GIVEN_UP:
            return
        since = self._since.get((node, observed), node.now)
        if node.now < since + patience_seconds:
            self.fail(f"{observed.request.request_id} was given up {node.now - since:.3f} s into an outage")

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        witness = node.witness
        waiting = [observed for observed in witness.waiting() if not eligible(witness.shards, observed)]
        unschedulable = [observed for observed in waiting if not witness.keeps(observed)]
        before = self._since
        if before or unschedulable:
            self._since = {key: at for key, at in before.items() if key[0] is not node}
            for observed in unschedulable:
                self._since[node, observed] = before.get((node, observed), node.now)
        if not isinstance(event, Tick):
            return
        for observed in unschedulable:
            seconds = node.now - self._since[node, observed]
            if seconds >= witness.patience_seconds(observed) and seconds > 0:
                self.fail(f"{observed.request.request_id} has waited {seconds:.3f} s for a shard that does not exist")


class DrainsEnd(Checker):
    """When the drain deadline of a router has passed, no request is left."""

    invariant = "drains_end"

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        if isinstance(event, DrainEnded) and node.witness.live:
            self.fail(f"{node.name} still has {list(node.witness.live)}")


_FULL: Final = ErrorReason.ERROR_REASON_QUEUE_FULL


def _reason(finish: Finish) -> int:
    return 0 if finish.error is None else finish.error.reason
