"""Unsafe text is not delivered."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence

from lab.dst import script
from lab.dst.checker import Checker
from lab.dst.observed import ObservedChoice, ObservedRequest
from lab.dst.views import SimulatedRouterView
from router.core.actions import SubmitAttempt


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
