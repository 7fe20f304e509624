"""Planted bugs in prompts that one shard computes for the answer of another."""

from __future__ import annotations

from lab.dst.checkers import HandoffsCollected, HandoffsKept, LegsFit
from router.core.dispatch.prefill_handoffs import PrefillHandoffs
from router.core.live import LiveRequest, PrefillHandoff
from tests.lab.dst.planted_bugs.registry import Patch, caught_by


@caught_by(LegsFit, first_seed=370)
def forgets_legs_of_requests_that_end(patch: Patch) -> None:
    """The prompt of a request that was cancelled is computed all the same."""

    def cancel(_self: PrefillHandoffs, _live: LiveRequest, split: PrefillHandoff, _now: float) -> None:
        split.end_leg()

    patch.setattr(PrefillHandoffs, "cancel", cancel)


@caught_by(HandoffsKept)
def uses_handoffs_again(patch: Patch) -> None:
    """An attempt that follows a failed one comes with the same hand-off, whose KV has been fetched."""

    def take_handoff(self: PrefillHandoff, *, is_usable: bool) -> bytes:
        self.is_used = is_usable and bool(self.handoff)
        return self.handoff if is_usable else b""

    patch.setattr(PrefillHandoff, "take_handoff", take_handoff)


@caught_by(HandoffsCollected)
def leaves_kv_of_cancelled_answers(patch: Patch) -> None:
    """The KV of an answer that ends before it is sent to a shard, or of a leg that was given up, stays until a
    timeout."""
    patch.setattr(PrefillHandoffs, "_collect", lambda *_: None)
