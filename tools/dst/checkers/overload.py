"""Who is refused, who goes first, and how long an outage is borne with."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.actions import Action, SubmitAttempt
from router.core.events import DrainEnded, Event, RequestArrived, Tick, Tier
from router.core.frames import Finish
from tools.dst.checkers.base import Checker
from tools.dst.witness.seen import SeenChoice, SeenRequest, State, eligible

if TYPE_CHECKING:
    from tools.dst.nodes.router_node import RouterNode

_GIVEN_UP: Final = (
    ErrorReason.ERROR_REASON_NO_SHARD_READY,
    ErrorReason.ERROR_REASON_SHARD_LOST,
    ErrorReason.ERROR_REASON_ENGINE_FAILED,
)


class RefusalsFit(Checker):
    """Nobody is refused for overload who would have fitted: while nobody waits and a shard is idle (under a policy that
    holds requests back: while nobody waits)."""

    invariant = "refusals_fit"

    def __init__(self) -> None:
        self._would_fit = False

    def before_event(self, node: RouterNode, event: Event) -> None:
        self._would_fit = False
        if isinstance(event, RequestArrived):
            model = event.request.model
            waiting = node.witness.waiting()
            shards = [s for s in node.witness.shards.values() if s.description.model == model and not s.is_draining]
            self._would_fit = (
                len(waiting) < node.config.max_queued_requests
                and not any(seen.request.model == model for seen in waiting)
                and (node.holds_requests or any(shard.is_idle for shard in shards))
            )

    def on_finish(self, node: RouterNode, choice: SeenChoice, finish: Finish) -> None:
        if self._would_fit and choice.request is node.witness.arriving and _reason(finish) == _FULL:
            self.fail(f"{choice.request.request.request_id} was refused, but there was a place for it")


class TiersKept(Checker):
    """Who can wait does: it is not sent while somebody urgent waits, and gives up its place in the queue to them. Under
    a policy that holds requests back, only the latter: there is nothing to be seen of the lines of shards."""

    invariant = "tiers_kept"

    def on_dispatch(self, node: RouterNode, seen: SeenRequest | None, attempt: SubmitAttempt) -> None:
        if seen is None or seen.request.tier is Tier.INTERACTIVE or seen.num_attempts or node.holds_requests:
            return
        if seen is not node.witness.arriving and self._waiting(node, seen, Tier.INTERACTIVE):
            self.fail(f"{seen.request.request_id}, which can wait, is sent while somebody urgent waits")

    def on_finish(self, node: RouterNode, choice: SeenChoice, finish: Finish) -> None:
        seen = choice.request
        if _reason(finish) != _FULL or seen.num_attempts or seen.request.tier is not Tier.INTERACTIVE:
            return
        if node.config.overload.sheds_early and seen is node.witness.arriving:
            return  # perhaps it would have waited too long, whoever gave up a place
        others = [other for other in node.witness.waiting() if other.request.tier is Tier.BATCH]
        if others and not any(other.was_dispatched for other in node.witness.waiting()):
            self.fail(
                f"{seen.request.request_id} is refused while {others[0].request.request_id}, which can wait, does"
            )

    @staticmethod
    def _waiting(node: RouterNode, seen: SeenRequest, tier: Tier) -> bool:
        model = seen.request.model
        return any(other.request.tier is tier and other.request.model == model for other in node.witness.waiting())


class OutagePatience(Checker):
    """Who waits for a shard that does not exist is told when the patience with outages is over, and not before."""

    invariant = "outage_patience"

    def __init__(self) -> None:
        self._since: dict[tuple[RouterNode, SeenRequest], float] = {}
        """Since when there is no shard for it."""

    def on_finish(self, node: RouterNode, choice: SeenChoice, finish: Finish) -> None:
        seen, patience_seconds = choice.request, node.config.overload.outage_patience_seconds
        if choice.state is not State.WAITING or seen is node.witness.arriving or _reason(finish) not in _GIVEN_UP:
            return
        since = self._since.get((node, seen), node.now)
        if node.now < since + patience_seconds:
            self.fail(f"{seen.request.request_id} was given up {node.now - since:.3f} s into an outage")

    def after_event(self, node: RouterNode, event: Event, actions: Sequence[Action]) -> None:
        unschedulable = [seen for seen in node.witness.waiting() if not eligible(node.witness.shards, seen)]
        before = self._since
        if before or unschedulable:
            self._since = {key: at for key, at in before.items() if key[0] is not node}
            for seen in unschedulable:
                self._since[node, seen] = before.get((node, seen), node.now)
        if not isinstance(event, Tick):
            return
        for seen in unschedulable:
            seconds = node.now - self._since[node, seen]
            if seconds >= node.config.overload.outage_patience_seconds and seconds > 0:
                self.fail(f"{seen.request.request_id} has waited {seconds:.3f} s for a shard that does not exist")


class DrainsEnd(Checker):
    """When a router that drains waits no longer, it has nothing left to do."""

    invariant = "drains_end"

    def after_event(self, node: RouterNode, event: Event, actions: Sequence[Action]) -> None:
        if isinstance(event, DrainEnded) and node.witness.live:
            self.fail(f"{node.name} goes on with {list(node.witness.live)}")


_FULL: Final = ErrorReason.ERROR_REASON_QUEUE_FULL


def _reason(finish: Finish) -> int:
    return 0 if finish.error is None else finish.error.reason
