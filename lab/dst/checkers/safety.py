"""Text is delivered as far as it was judged, and none that is unsafe."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

import math
from collections.abc import Sequence

from lab.dst import script
from lab.dst.checker import Checker
from lab.dst.observed import ObservedChoice, ObservedRequest
from lab.dst.views import SimulatedRouterView
from router.core.actions import Action, ScreenAnswers, SubmitAttempt
from router.core.events import AnswersScreened, Event, RequestArrived, SafetyDown


class SafetyKept(Checker):
    """If the safety service is required, no part of an answer to a blocked prompt is delivered. In mode `gate` no
    halted text is delivered, and none at all while the service is down. No request starts while it is down for long."""

    invariant = "safety_kept"

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if node.config.safety_required and observed is not None and observed.policy is None:
            self.fail(
                f"{observed.request.request_id} was dispatched although it arrived while the safety service was down"
            )

    def on_sent(self, node: SimulatedRouterView, choice: ObservedChoice, token_ids: Sequence[int], delta: str) -> None:
        policy = choice.request.policy
        if not node.config.safety_required or policy is None:
            return
        screens_prompts, screens_answers = policy
        request = choice.request.request
        if screens_prompts and request.prompt_text == script.BLOCKED_WORD:
            self.fail(f"{request.request_id} has a blocked prompt, but got {delta!r}")
        if screens_answers and node.config.answer_mode == "gate":
            if node.witness.policy is None and delta:
                self.fail(f"{request.request_id} got {delta!r} while the safety service was down")
            text = f" {choice.sent_text}{delta}"
            if f" {script.HALTED_TOKEN} " in text or script.HALTED_TOKEN in token_ids:
                self.fail(f"{request.request_id} got {text!r}")


class VerdictsAwaited(Checker):
    """In mode `gate` no more of an answer is delivered than the safety service has cleared, if it is required. Of a
    request with several choices, no more of each than of any."""

    invariant = "verdicts_awaited"

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], str] = {}
        """By router and screening slot, the request whose answer is screened there."""
        self._num_clear: dict[tuple[int, str], float] = {}
        """By router and request."""

    def before_event(self, node: SimulatedRouterView, event: Event) -> None:
        router = id(node)
        match event:
            case AnswersScreened():
                halts = [(halt.slot, halt.num_clear_chars) for halt in event.halts]
                closed = [(slot, math.inf) for slot in event.closed_slots]
                for slot, num_clear in (*zip(event.slots, event.num_clear_chars, strict=True), *halts, *closed):
                    key = router, self._names[router, slot]
                    self._num_clear[key] = max(self._num_clear.get(key, 0), num_clear)
            case RequestArrived() if event.request.request_id not in node.witness.live:
                self._num_clear.pop((router, event.request.safety_identifier), None)
            case SafetyDown():
                for key in [key for key in self._names if key[0] == router]:
                    del self._names[key]
            case _:
                pass

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, ScreenAnswers):
                for scope in action.scopes:
                    self._names[id(node), scope.slot] = scope.safety_identifier

    def on_sent(self, node: SimulatedRouterView, choice: ObservedChoice, token_ids: Sequence[int], delta: str) -> None:
        policy, request, event = choice.request.policy, choice.request.request, node.witness.event
        if not node.config.safety_required or node.config.answer_mode != "gate" or policy is None or not policy[1]:
            return
        if isinstance(event, RequestArrived) and event.cached:
            return  # it was judged when it was generated
        num_sent = len(choice.sent_text) + len(delta)
        num_clear = self._num_clear.get((id(node), request.safety_identifier), 0)
        if delta and num_sent > num_clear:
            self.fail(f"{request.request_id} got {num_sent} characters, of which {num_clear} were cleared")
