"""Checks how requests end: once, metered exactly, for a reason, and by their deadline."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from lab.dst import script
from lab.dst.checker import Checker
from lab.dst.observed import ObservedChoice, ObservedRequest, State, eligible
from lab.dst.views import AnswerView, SimulatedRouterView, WorldView
from router.core.actions import Action, RequestEnded, SubmitAttempt
from router.core.events import Event, RequestArrived, RequestCancelled, SlotsCancelled, Tick
from router.core.frames import Finish
from router.core.relay.lifecycle import MAX_STRIKES


class EndsOnce(Checker):
    """Every request ends exactly once, and so does every choice of a client that stays connected."""

    invariant = "ends_once"

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        arriving = node.witness.arriving
        if arriving is None:
            return
        is_live = node.witness.live.get(arriving.request.request_id) is arriving
        if is_live + arriving.num_ends != 1:
            self.fail(f"{arriving.request.request_id} was neither admitted nor rejected exactly once")
        if not is_live and any(choice.state is not State.DONE for choice in arriving.choices):
            self.fail(f"{arriving.request.request_id} was rejected, but its client got no finish")

    def on_ended(self, node: SimulatedRouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        if observed is None or observed.num_ends:
            self.fail(f"{end.request_id} ended although it was not live")
        if any(choice.state is not State.DONE for choice in observed.choices):
            self.fail(f"{end.request_id} was reported as ended while one of its choices continues")

    def on_quiescence(self, world: WorldView) -> None:
        for node in world.nodes:
            if node.witness.live:
                self.fail(f"{node.name} never ended {list(node.witness.live)}")
            for stream in node.clients.values():
                if stream.is_open_at_client and stream.open:
                    self.fail(f"{stream.client_id} waits forever for {len(stream.open)} answers")


class MeteredIsDelivered(Checker):
    """The metered tokens are those that were sent to the client, and those that the client read."""

    invariant = "metered_is_delivered"

    def on_ended(self, node: SimulatedRouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        num_sent = 0 if observed is None else sum(choice.num_sent_tokens for choice in observed.choices)
        if end.num_output_tokens != num_sent:
            self.fail(f"{end.request_id}: {num_sent} tokens were sent, {end.num_output_tokens} were metered")

    def on_client_finish(self, answer: AnswerView, finish: Finish) -> None:
        if finish.reason != FinishReason.FINISH_REASON_ERROR and finish.num_output_tokens != answer.num_tokens:
            self.fail(
                f"{answer.request.request_id}: the client has {answer.num_tokens} tokens, its finish says "
                f"{finish.num_output_tokens}"
            )


class EndsJustified(Checker):
    """Nothing is rejected, cancelled, filtered or given up without a cause that is visible from outside."""

    invariant = "ends_justified"

    def on_finish(self, node: SimulatedRouterView, choice: ObservedChoice, finish: Finish) -> None:
        if finish.reason == FinishReason.FINISH_REASON_CANCELLED:
            if not isinstance(node.witness.event, SlotsCancelled | RequestCancelled):
                self.fail(f"{choice.request.request.request_id} was cancelled without a request to do so")
        elif finish.reason == FinishReason.FINISH_REASON_CONTENT_FILTER:
            self._check_filtered(choice)
        elif finish.reason == FinishReason.FINISH_REASON_ERROR:
            reason = 0 if finish.error is None else finish.error.reason
            is_cause = _CAUSES.get(reason)
            if is_cause is None or not is_cause(node, choice):
                self.fail(
                    f"{choice.request.request.request_id} ended with {ErrorReason.Name(reason)}, without a "
                    f"visible cause"
                )

    def _check_filtered(self, choice: ObservedChoice) -> None:
        request = choice.request.request
        assert isinstance(request.sampling, script.ScriptedSampling)
        is_bad_answer = script.HALTED_TOKEN in script.answer(request.sampling.script_key, choice.spec.index)
        if request.prompt_text != script.BLOCKED_WORD and not is_bad_answer:
            self.fail(f"{request.request_id} was filtered, but there is nothing wrong with it")


def _failed_everywhere(node: SimulatedRouterView, choice: ObservedChoice) -> bool:
    """True when it has had all its attempts, or there is no shard for another one."""
    if not choice.num_attempts:
        return False
    return choice.num_failures >= node.config.max_attempts or not eligible(node.witness.shards, choice.request)


def _queue_was_full(node: SimulatedRouterView, choice: ObservedChoice) -> bool:
    if choice.num_attempts:
        return _failed_everywhere(node, choice)
    witness = node.witness
    if witness.arriving is None:
        return False
    if choice.request is witness.arriving and choice.request.may_be_impossible:
        return True
    if node.config.overload.sheds_load_early and choice.request is witness.arriving:
        return True  # by prediction: RejectionsJustified checks whether it would have fitted
    # The queue is served after a request has arrived: what filled it may be dispatched or given up in the same event.
    queued = {*witness.waiting(), *witness.dispatched, *witness.given_up} - {choice.request}
    return len(queued) >= node.config.max_queued_requests


def _does_not_fit(node: SimulatedRouterView, choice: ObservedChoice) -> bool:
    able = (shard for shard in node.witness.shards.values() if shard.has_adapter_of(choice.request))
    shards = [shard for shard in able if not shard.is_draining]
    model = choice.request.request.model
    windows = [s.description.max_model_len for s in shards if s.description.model == model]
    request = choice.request.request
    longest = max(len(spec.output_token_ids) for spec in request.choices)
    num_output_tokens = longest + 1 if request.max_tokens is None else request.max_tokens
    return bool(windows) and max(windows) < len(request.prompt_token_ids) + num_output_tokens


def _is_unscreenable(node: SimulatedRouterView, choice: ObservedChoice) -> bool:
    """True when the safety service was down for too long, or so slow that too much text was held back."""
    if node.witness.safety_waited_for_until is not None and node.config.answer_mode == "gate":
        most_held = max(len(sibling.emitted) - sibling.num_sent_tokens for sibling in choice.request.choices)
        return most_held > max(1, node.config.max_uncleared_tokens // len(choice.request.choices))
    return node.config.safety_required and (node.witness.policy is None or any(choice.request.policy or ()))


def _no_shard(node: SimulatedRouterView, choice: ObservedChoice) -> bool:
    is_refused = choice.request is node.witness.arriving and node.witness.refuses(choice.request)
    return not is_refused and not eligible(node.witness.shards, choice.request)


def _does_not_exist(node: SimulatedRouterView, choice: ObservedChoice) -> bool:
    """True when there is no such model or adapter, or no longer."""
    observed, witness = choice.request, node.witness
    if observed is witness.arriving:
        return witness.refuses(observed)
    return observed.request.adapter is not None and not eligible(witness.shards, observed)


_CAUSES: Final[dict[int, Callable[[SimulatedRouterView, ObservedChoice], bool]]] = {
    ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED: lambda node, choice: (
        node.now >= choice.request.deadline
        # It waits, and could not be answered before its deadline any more.
        or (choice.request.has_deadline and node.config.overload.sheds_load_early and not choice.request.was_dispatched)
    ),
    ErrorReason.ERROR_REASON_DEADLINE_IMPOSSIBLE: lambda node, choice: (
        choice.request is node.witness.arriving and choice.request.may_be_impossible
    ),
    ErrorReason.ERROR_REASON_QUEUE_TIMEOUT: lambda node, choice: (
        (node.now >= choice.request.queue_deadline or node.config.overload.sheds_load_early)
        and not choice.request.was_dispatched
    ),
    ErrorReason.ERROR_REASON_QUEUE_FULL: _queue_was_full,
    # BrownoutAtAdmission checks the step.
    ErrorReason.ERROR_REASON_BROWNOUT: lambda node, choice: (
        node.config.brownout is not None and choice.request is node.witness.arriving
    ),
    ErrorReason.ERROR_REASON_NO_SHARD_READY: _no_shard,
    ErrorReason.ERROR_REASON_MODEL_NOT_FOUND: _does_not_exist,
    ErrorReason.ERROR_REASON_ADAPTER_NOT_FOUND: _failed_everywhere,
    ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED: _does_not_fit,
    ErrorReason.ERROR_REASON_INVALID_ARGUMENT: lambda _node, choice: (
        not choice.request.request.prompt_token_ids or choice.request.request.max_tokens == 0
    ),
    ErrorReason.ERROR_REASON_DUPLICATE_REQUEST_ID: lambda _node, choice: choice.request.is_duplicate,
    ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE: _is_unscreenable,
    ErrorReason.ERROR_REASON_DRAINING: lambda node, choice: node.is_draining or _failed_everywhere(node, choice),
    ErrorReason.ERROR_REASON_SHARD_LOST: _failed_everywhere,
    ErrorReason.ERROR_REASON_ENGINE_FAILED: _failed_everywhere,
    ErrorReason.ERROR_REASON_REQUEST_QUARANTINED: lambda _node, choice: choice.num_strikes >= MAX_STRIKES,
}


class DeadlinesKept(Checker):
    """After a tick no overdue request is left, and the next tick is requested in time. An overdue request is not
    dispatched."""

    invariant = "deadlines_kept"

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if observed is None:
            return
        deadline = observed.deadline if observed.was_dispatched else min(observed.deadline, observed.queue_deadline)
        if observed is not node.witness.arriving and node.now >= deadline:
            self.fail(
                f"{observed.request.request_id} was dispatched at {node.now:.3f}, its deadline was {deadline:.3f}"
            )

    def on_prefill_chunk(
        self, node: SimulatedRouterView, observed: ObservedRequest | None, prefill_chunk: SubmitAttempt
    ) -> None:
        self.on_dispatch(node, observed, prefill_chunk)

    def on_prefill_leg(self, node: SimulatedRouterView, observed: ObservedRequest | None, leg: SubmitAttempt) -> None:
        self.on_dispatch(node, observed, leg)

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        if not isinstance(event, Tick | RequestArrived):
            return
        now, earliest = node.now, float("inf")
        for observed in node.witness.live.values():
            deadline = observed.deadline
            if observed.is_waiting and not observed.was_dispatched:
                deadline = min(deadline, observed.queue_deadline)
            earliest = min(earliest, deadline)
            if isinstance(event, Tick) and deadline <= now:
                self.fail(f"{observed.request.request_id} is still live at {now:.3f}, its deadline was {deadline:.3f}")
        next_tick = node.core.next_deadline()
        if node.witness.live and (next_tick is None or next_tick > earliest):
            self.fail(f"the next tick is asked for at {next_tick}, a deadline is at {earliest:.3f}")
