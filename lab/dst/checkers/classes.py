"""Declared classes: none starves, floors hold, and scheduling ends no answer."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from typing import Final, NamedTuple

from kvloom.v1.error_reason_pb2 import ErrorReason
from lab.dst.checker import Checker
from lab.dst.observed import AttemptDeparture, ObservedChoice, ObservedRequest, State, eligible
from lab.dst.views import SimulatedRouterView
from router.core.actions import RequestEnded, SubmitAttempt
from router.core.events import class_of
from router.core.frames import Finish

_FOR_WANT_OF_A_SHARD: Final = (
    ErrorReason.ERROR_REASON_DRAINING,
    ErrorReason.ERROR_REASON_SHARD_LOST,
    ErrorReason.ERROR_REASON_NO_SHARD_READY,
)
MAX_PASSED: Final = 16
"""How many requests of classes that are ahead may be dispatched while one waits that counts as urgent as any: the
output of a running request is counted late, and a retry need not wait for its turn."""
OUTPUT_TOKEN_WEIGHT: Final = 2.0
"""How much more than a token of a prompt it counts."""


class ClassesAge(Checker):
    """A request that has waited so long that it counts as urgent as any is passed by few requests of the classes that
    are ahead of its own. Classes share by weight then, in tokens, and each is dispatched with the least service of
    all: until a class has had as much as another since the other's last turn, it is not ahead. Not checked where floors
    or tenants that compete may keep a request from a shard, nor under a policy that holds requests back, whose queues
    cannot be seen."""

    invariant = "classes_age"

    def __init__(self) -> None:
        self._num_passed: dict[_Class, int] = {}
        self._service: dict[_Class, float] = {}
        self._num_counted: dict[ObservedRequest, int] = {}
        """Tokens of answers that are in `_service`."""
        self._at_last_turn: dict[_Class, dict[str, float]] = {}
        """By class: the service of every class at its last turn."""

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if observed is None or not _shares_by_weight(node):
            return
        for live in node.witness.live.values():
            self._count_output(node, live)
        own = _class_of(node, observed)
        names = [one.name for one in node.config.classes]
        services = {name: self._service.get(own._replace(name=name), 0.0) for name in names}
        if observed is not node.witness.arriving and not observed.num_attempts:
            self._pass_others(node, own, attempt, services)
        self._num_passed.pop(own, None)
        self._at_last_turn[own] = services
        num_prefill = len(observed.request.prompt_token_ids) - attempt.num_expected_cached_tokens
        self._serve(own, observed, 0 if observed.num_attempts else max(1, num_prefill))

    def on_ended(self, node: SimulatedRouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        if observed is not None and _shares_by_weight(node):
            self._count_output(node, observed)
            self._num_counted.pop(observed, None)

    def _pass_others(
        self, node: SimulatedRouterView, own: _Class, attempt: SubmitAttempt, services: dict[str, float]
    ) -> None:
        passed: set[_Class] = set()
        for other in node.witness.waiting():
            its, model = class_of(other.request), other.request.model
            waited_seconds = node.now - other.arrived_at
            if its.name == own.name or model != own.model or its.rank_after(waited_seconds) > 0:
                continue
            its_class = own._replace(name=its.name)
            before = self._at_last_turn.get(its_class, {})
            ahead = [services[name] - before.get(name, 0.0) for name in (own.name, its.name)]
            if ahead[0] <= ahead[1]:
                continue
            fairness = node.config.fairness
            if any(
                shard.description.shard_id == attempt.shard_id
                and not shard.may_be_left_free(other.request.tenant, fairness)
                for shard in eligible(node.witness.shards, other)
            ):
                passed.add(its_class)
        for one in passed:
            count = self._num_passed[one] = self._num_passed.get(one, 0) + 1
            if count > MAX_PASSED:
                self.fail(
                    f"the class {one.name} waits on {node.name} while {count} requests of others were served that had "
                    "had more"
                )

    def _count_output(self, node: SimulatedRouterView, observed: ObservedRequest) -> None:
        num_emitted = sum(len(choice.emitted) for choice in observed.choices)
        num_new = num_emitted - self._num_counted.get(observed, 0)
        if num_new:
            self._num_counted[observed] = num_emitted
            self._serve(_class_of(node, observed), observed, OUTPUT_TOKEN_WEIGHT * num_new)

    def _serve(self, own: _Class, observed: ObservedRequest, service: float) -> None:
        self._service[own] = self._service.get(own, 0.0) + service / class_of(observed.request).weight


class _Class(NamedTuple):
    """Requests of one class for one model."""

    node: SimulatedRouterView
    model: str
    name: str


def _class_of(node: SimulatedRouterView, observed: ObservedRequest) -> _Class:
    return _Class(node, observed.request.model, class_of(observed.request).name)


def _shares_by_weight(node: SimulatedRouterView) -> bool:
    classes = node.config.classes
    return bool(classes) and not node.holds_requests and not any(one.reserved_share for one in classes)


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
