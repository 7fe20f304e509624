"""Brownout: requests are degraded when they arrive, by the step on which their model is then, and never after."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence

from kvloom.v1.error_reason_pb2 import ErrorReason
from lab.dst.checker import Checker
from lab.dst.observed import ObservedChoice, ObservedRequest
from lab.dst.views import SimulatedRouterView
from router.core.actions import Action, BrownoutStepChanged, RequestDegraded, RequestEnded, SubmitAttempt
from router.core.degradation import Degradation
from router.core.events import Event, Request, RequestArrived
from router.core.frames import Finish


class BrownoutAtAdmission(Checker):
    """A request is degraded by the step of its model at its arrival; all its attempts are degraded alike, whatever the
    step is then. A cap is never larger than what was asked for, no attempt is larger than the cap, and only a request
    that arrives is refused. Answers that others have begun are left alone. A step changes by one at a time."""

    invariant = "brownout_at_admission"

    def __init__(self) -> None:
        self._steps: dict[tuple[str, str], int] = {}
        """By router and model."""
        self._step_at_arrival: dict[ObservedRequest, int] = {}
        """The steps at the arrival of requests that have not ended."""
        self._degradations: dict[ObservedRequest, Degradation | None] = {}
        """The degradations that first attempts had."""
        self._is_refused = False
        """True when the brownout refuses the request that arrives in this event."""

    def before_event(self, node: SimulatedRouterView, event: Event) -> None:
        self._is_refused = False

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if observed is None:
            return
        name, degradation = observed.request.request_id, attempt.request.degradation
        if observed in self._degradations:
            if degradation != self._degradations[observed]:
                self.fail(f"{name} was admitted with {self._degradations[observed]}, and now has {degradation}")
        else:
            self._degradations[observed] = degradation
            if observed is not node.witness.arriving:  # its step is known after the event
                self._check_admitted(observed, degradation, self._step_at_arrival.get(observed, 0))
        if degradation is None or degradation.max_tokens is None:
            return
        asked = observed.request.max_tokens
        if asked is not None and degradation.max_tokens >= asked:
            self.fail(f"{name} asked for {asked} tokens, and is capped at {degradation.max_tokens}")
        if attempt.max_tokens > degradation.max_tokens:
            self.fail(f"{name} is capped at {degradation.max_tokens}, and its shard may emit {attempt.max_tokens}")

    def _check_admitted(self, observed: ObservedRequest, degradation: Degradation | None, step: int) -> None:
        name = observed.request.request_id
        if degradation is None:
            return
        if observed.is_continued:
            self.fail(f"{name} was begun elsewhere, and is degraded: {degradation}")
        if degradation.step != step:
            self.fail(f"{name} arrived on step {step}, and is degraded by step {degradation.step}")

    def on_finish(self, node: SimulatedRouterView, choice: ObservedChoice, finish: Finish) -> None:
        if finish.error is None or finish.error.reason != ErrorReason.ERROR_REASON_BROWNOUT:
            return
        name = choice.request.request.request_id
        if choice.request is not node.witness.arriving:
            self.fail(f"{name} was admitted, and is refused by the brownout")
        self._is_refused = True

    def on_ended(self, node: SimulatedRouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        if observed is not None:
            self._degradations.pop(observed, None)
            self._step_at_arrival.pop(observed, None)

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        if isinstance(event, RequestArrived):
            self._note_arrival(node, event.request, self._step_on_arrival(node, event.request.model, actions))
        for action in actions:
            if isinstance(action, BrownoutStepChanged):
                if abs(action.step - action.previous_step) != 1 or action.step < 0:
                    self.fail(f"{action.model} goes from step {action.previous_step} to {action.step}")
                self._steps[node.name, action.model] = action.step

    def _step_on_arrival(self, node: SimulatedRouterView, model: str, actions: Sequence[Action]) -> int:
        """The step by which a request for the model that arrived in this event was degraded. Requests that were overdue
        end before it is looked at, and change the step for it; those that lose their place to it end after that."""
        step = self._steps.get((node.name, model), 0)
        for action in actions:
            if isinstance(action, RequestDegraded):
                break
            if isinstance(action, BrownoutStepChanged) and action.model == model:
                step = action.step
        return step

    def _note_arrival(self, node: SimulatedRouterView, request: Request, step: int) -> None:
        arrived = node.witness.live.get(request.request_id)
        if arrived is not None and arrived.request is request:
            self._step_at_arrival[arrived] = step
            self._check_admitted(arrived, self._degradations.get(arrived), step)
        if self._is_refused and not step:
            self.fail(f"{request.request_id} is refused by the brownout of a model that is on no step")
