"""Declared classes: none starves, floors hold, and scheduling ends no answer."""

from __future__ import annotations

from typing import Final

from kvloom.v1.error_reason_pb2 import ErrorReason
from lab.dst.checker import Checker
from lab.dst.observed import AttemptDeparture, ObservedChoice, ObservedRequest, State, eligible
from lab.dst.views import SimulatedRouterView
from router.core.actions import SubmitAttempt
from router.core.events import class_of
from router.core.frames import Finish

_FOR_WANT_OF_A_SHARD: Final = (
    ErrorReason.ERROR_REASON_DRAINING,
    ErrorReason.ERROR_REASON_SHARD_LOST,
    ErrorReason.ERROR_REASON_NO_SHARD_READY,
)
MAX_PASSED: Final = 25
"""How many requests of other classes may be dispatched while one waits that counts as urgent as any. Classes share by
weight then, in tokens: of a few requests, all may be those of the heavier class."""


class ClassesAge(Checker):
    """A request that has waited so long that it counts as urgent as any is passed by few requests of other classes. Not
    checked where floors or tenants that compete may keep it from a shard, nor under a policy that holds requests back,
    whose queues cannot be seen."""

    invariant = "classes_age"

    def __init__(self) -> None:
        self._num_passed: dict[tuple[SimulatedRouterView, str, str], int] = {}

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        classes = node.config.classes
        if observed is None or node.holds_requests or not classes or any(one.reserved_share for one in classes):
            return
        own, model = class_of(observed.request), observed.request.model
        self._num_passed.pop((node, model, own.name), None)
        if observed is node.witness.arriving or observed.num_attempts:
            return
        passed: set[str] = set()
        for other in node.witness.waiting():
            its = class_of(other.request)
            waited_seconds = node.now - other.arrived_at
            if its.name == own.name or other.request.model != model or its.rank_after(waited_seconds) > 0:
                continue
            shards = eligible(node.witness.shards, other)
            fairness = node.config.fairness
            if any(
                shard.description.shard_id == attempt.shard_id
                and not shard.may_be_left_free(other.request.tenant, fairness)
                for shard in shards
            ):
                passed.add(its.name)
        for name in passed:
            key = (node, model, name)
            count = self._num_passed[key] = self._num_passed.get(key, 0) + 1
            if count > MAX_PASSED:
                self.fail(f"the class {name} waits on {node.name} while {count} requests of others were served")


class FloorsKept(Checker):
    """While a class with a floor has a sequence on a shard, other classes are not sent into its places there."""

    invariant = "floors_kept"

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        shard = node.witness.shards.get(attempt.shard_id)
        reserving = [one for one in node.config.classes if one.reserved_share]
        if observed is None or shard is None or not reserving:
            return
        own, num_places = class_of(observed.request), shard.num_places
        names = [
            class_of(choice.request.request).name
            if choice is not None and choice.state is State.RUNNING and not choice.request.is_ending
            else None
            for choice in shard.open.values()
        ]
        if own.reserved_share and names.count(own.name) < int(own.reserved_share * num_places):
            return
        for one in reserving:
            num_held = names.count(one.name)
            if one.name == own.name or not num_held:
                continue
            num_others = len(names) - num_held + len(attempt.choices)
            if num_others > num_places - max(1, int(one.reserved_share * num_places)):
                self.fail(f"{observed.request.request_id} of {own.name} was sent into the places of {one.name}")


class SchedulingEndsNothing(Checker):
    """An answer that has begun does not end because it waits again for a place, nor because its shard had notice."""

    invariant = "scheduling_ends_nothing"

    def on_finish(self, node: SimulatedRouterView, choice: ObservedChoice, finish: Finish) -> None:
        error = finish.error
        if choice.num_attempts and error is not None and error.reason == ErrorReason.ERROR_REASON_QUEUE_TIMEOUT:
            self.fail(f"{choice.request.request.request_id} had begun, and was given up because it had to wait")
        observed, witness = choice.request, node.witness
        if error is None or node.is_draining or error.reason not in _FOR_WANT_OF_A_SHARD:
            return
        # One that does not wait has failed since then, as often as it may.
        if choice.state is State.WAITING and observed.left_by is AttemptDeparture.NOTICE and witness.keeps(observed):
            self.fail(f"{observed.request.request_id} was given up because its shard had notice")
