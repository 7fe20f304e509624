"""Fleets of several models, and models that are loaded and unloaded while traffic runs."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvloom.v1.error_reason_pb2 import ErrorReason
from lab.dst.checker import Checker
from lab.dst.checkers.quiescence import plan_of
from lab.dst.observed import ObservedChoice, ObservedRequest, eligible
from lab.dst.views import ShardStreamView, ShardView, SimulatedRouterView, WorldView
from router.core.actions import Action, CancelOnShard, RequestEnded, ShardHealthChanged, SubmitAttempt
from router.core.events import ChoiceSpec, Event, LoadReported
from router.core.frames import Finish

_OVERDUE: Final = (ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, ErrorReason.ERROR_REASON_QUEUE_TIMEOUT)
_SHARD_AWAY: Final = (
    ErrorReason.ERROR_REASON_MODEL_NOT_FOUND,
    ErrorReason.ERROR_REASON_NO_SHARD_READY,
    ErrorReason.ERROR_REASON_SHARD_LOST,
    ErrorReason.ERROR_REASON_DRAINING,
)


class ModelsKeptApart(Checker):
    """No request, and no part of its prompt, is computed by a shard of another model, or with another adapter, than it
    names."""

    invariant = "models_kept_apart"

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if observed is not None and observed.request.model != attempt.request.model:
            self.fail(f"{attempt.request.request_id} is for {observed.request.model}, not {attempt.request.model}")
        if observed is not None and observed.request.adapter != attempt.request.adapter:
            self.fail(f"{attempt.request.request_id} names {observed.request.adapter}, not {attempt.request.adapter}")
        self.on_prefill_chunk(node, observed, attempt)

    def on_prefill_chunk(
        self, node: SimulatedRouterView, observed: ObservedRequest | None, prefill_chunk: SubmitAttempt
    ) -> None:
        shard, request = node.witness.shards.get(prefill_chunk.shard_id), prefill_chunk.request
        if shard is not None and shard.description.model != request.model:
            self.fail(f"{request.request_id} for {request.model} was sent to a shard of {shard.description.model}")
        if observed is not None and observed.request.adapter != request.adapter:
            self.fail(f"{request.request_id} prepares {observed.request.adapter} with {request.adapter}")
        if shard is not None and observed is not None and not shard.has_adapter_of(observed):
            self.fail(f"{request.request_id} was sent to {prefill_chunk.shard_id}, which does not have its adapter")

    def on_prefill_leg(self, node: SimulatedRouterView, observed: ObservedRequest | None, leg: SubmitAttempt) -> None:
        self.on_prefill_chunk(node, observed, leg)

    def on_submit(self, shard: ShardView, stream: ShardStreamView, attempt: SubmitAttempt, spec: ChoiceSpec) -> None:
        if attempt.request.model != shard.shape.model:
            self.fail(
                f"{attempt.request.request_id} for {attempt.request.model} arrived at {shard.shard_id}, which serves "
                f"{shard.shape.model}"
            )


class WithdrawalsKept(Checker):
    """A request for a model or an adapter that does not exist is refused with this reason, and so is one for a model
    that has been withdrawn, unless it continues an answer. A withdrawn model is forgotten with its last shard, and none
    before."""

    invariant = "withdrawals_kept"

    def on_finish(self, node: SimulatedRouterView, choice: ObservedChoice, finish: Finish) -> None:
        observed, reason = choice.request, 0 if finish.error is None else finish.error.reason
        if observed is not node.witness.arriving or node.is_draining:
            return
        if node.witness.refuses(observed) and reason != ErrorReason.ERROR_REASON_MODEL_NOT_FOUND:
            self.fail(f"{observed.request.request_id} is for {observed.request.model}, but got {finish}")

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        arriving = node.witness.arriving
        if arriving is None or node.witness.live.get(arriving.request.request_id) is not arriving:
            return
        if node.witness.refuses(arriving):
            self.fail(f"{arriving.request.request_id} was admitted, but {arriving.request.model} takes no new requests")

    def on_quiescence(self, world: WorldView) -> None:
        loaded = {shard.shape.model for shard in world.shards}
        for node in world.nodes:
            for model in world.traffic.models:
                error = plan_of(node, model, "tenant-0", (1,)).error
                is_unknown = error is not None and error.reason == ErrorReason.ERROR_REASON_MODEL_NOT_FOUND
                if is_unknown is node.witness.knows(model):
                    self.fail(f"{node.name} should {'' if is_unknown else 'not '}know {model}, but answers {error}")
                if model in loaded and error is not None:
                    self.fail(f"{node.name} does not serve {model}, which is loaded: {error}")
                # Otherwise the last load reports of the shards may have been lost.
                if world.is_harmless and not is_unknown and model not in loaded:
                    self.fail(f"{node.name} still knows {model}, which has been unloaded")


class UnloadsHarmless(Checker):
    """A withdrawal ends and cancels nothing. While nothing else happens to the shards, no admitted request ends for
    want of one: neither those of a model that is unloaded nor those of another. Only an answer that some other router
    began, and that arrives when the model has been withdrawn, may come as its shards stop."""

    invariant = "unloads_harmless"

    def __init__(self) -> None:
        self._is_withdrawal = False
        self._hopeless: set[str] = set()
        """Ids of the requests for which there was no shard when the withdrawal was reported."""
        self._late: set[ObservedRequest] = set()
        """Those that arrived when their model had been withdrawn."""

    def before_event(self, node: SimulatedRouterView, event: Event) -> None:
        self._is_withdrawal = False
        if isinstance(event, LoadReported) and event.load.withdrawn:
            shard = node.witness.shards.get(event.shard_id)
            is_drain = event.load.draining or event.load.hand_over
            self._is_withdrawal = shard is not None and not shard.is_withdrawn and not is_drain
        if self._is_withdrawal:
            shards, waiting = node.witness.shards, node.witness.waiting()
            self._hopeless = {one.request.request_id for one in waiting if not eligible(shards, one)}

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        arriving = node.witness.arriving
        if node.is_harmless and arriving is not None and node.witness.is_withdrawn(arriving.request.model):
            self._late.add(arriving)
        if not self._is_withdrawal or any(isinstance(action, ShardHealthChanged) for action in actions):
            return
        ended = {action.request_id: action.error_reason for action in actions if isinstance(action, RequestEnded)}
        broken = [name for name, reason in ended.items() if reason not in _OVERDUE and name not in self._hopeless]
        if broken:
            self.fail(f"a withdrawal ended {broken} on {node.name}")
        if not ended and any(self._is_needed(node, action) for action in actions):
            self.fail(f"a withdrawal cancelled sequences on {node.name}")

    @staticmethod
    def _is_needed(node: SimulatedRouterView, action: Action) -> bool:
        """True when it cancels sequences, rather than probes and prefill chunks."""
        if not isinstance(action, CancelOnShard):
            return False
        shard = node.witness.shards.get(action.shard_id)
        return shard is not None and any(shard.open.get(slot) is not None for slot in action.slots)

    def on_finish(self, node: SimulatedRouterView, choice: ObservedChoice, finish: Finish) -> None:
        reason = 0 if finish.error is None else finish.error.reason
        is_late = choice.request is node.witness.arriving or choice.request in self._late
        if node.is_harmless and not is_late and reason in _SHARD_AWAY:
            name, model = choice.request.request.request_id, choice.request.request.model
            self.fail(f"{name} for {model} ended with {ErrorReason.Name(reason)}")
