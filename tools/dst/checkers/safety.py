"""What must not be seen is not sent."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from router.core.actions import SubmitAttempt
from tools.dst import script
from tools.dst.checkers.base import Checker

if TYPE_CHECKING:
    from tools.dst.nodes.router_node import RouterNode
    from tools.dst.witness.seen import SeenChoice, SeenRequest


class SafetyKept(Checker):
    """Where the safety service is required, nothing is shown of an answer to a prompt that it blocks. In mode `gate`
    nothing is shown that it halts, and nothing while it is away. Nothing begins while it is away for long."""

    invariant = "safety_kept"

    def on_dispatch(self, node: RouterNode, seen: SeenRequest | None, attempt: SubmitAttempt) -> None:
        if node.config.safety_required and seen is not None and seen.policy is None:
            self.fail(f"{seen.request.request_id} was dispatched although it came while the safety service was away")

    def on_sent(self, node: RouterNode, choice: SeenChoice, token_ids: Sequence[int], delta: str) -> None:
        policy = choice.request.policy
        if not node.config.safety_required or policy is None:
            return
        screens_prompts, screens_answers = policy
        request = choice.request.request
        if screens_prompts and request.prompt_text == script.BLOCKED_WORD:
            self.fail(f"{request.request_id} has a blocked prompt, and {delta!r} was sent")
        if screens_answers and node.config.answer_mode == "gate":
            if node.witness.policy is None and delta:
                self.fail(f"{request.request_id} was shown {delta!r} while the safety service was away")
            text = f" {choice.sent_text}{delta}"
            if f" {script.HALTED_TOKEN} " in text or script.HALTED_TOKEN in token_ids:
                self.fail(f"{request.request_id} was shown {text!r}")
