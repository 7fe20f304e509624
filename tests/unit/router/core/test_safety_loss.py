"""A safety service that dies and returns: requests that need it wait, within bounds, and nothing unscreened is
shown."""

from __future__ import annotations

import pytest

from kvloom.errors import reason_name
from kvloom.v1.generation_pb2 import FinishReason
from router.core.actions import CheckPrompt, ScreenAnswers, SendStep
from router.core.events import AnswerHalt, AnswersScreened, PromptVerdict, SafetyDown, SafetyUp, Tick
from tests.fakes.core_rig import CoreRig, has, only, sent, submitted


class Suspicious:
    """A prefilter: only texts with an x need to be screened."""

    def is_suspicious(self, text: str) -> bool:
        return "x" in text


def gated(**config: object) -> tuple[CoreRig, str, int, int]:
    """A running answer, "abcd" sent to be screened, "abc" of it clear and "ab" shown: rig, shard, slots."""
    rig = CoreRig(safety=(False, True), **config)
    rig.add_shard()
    shard_id, [slot] = submitted(rig.submit())
    [screening_slot] = only(rig.start(shard_id, slot, 1, "ab"), ScreenAnswers).slots
    rig.step(shard_id, (slot, [2], "cd"))
    assert sent(rig.handle(AnswersScreened([screening_slot], [3]))).deltas == ["ab"]
    return rig, shard_id, slot, screening_slot


def test_a_running_answer_waits_and_continues() -> None:
    """Text that was not clear is screened again, together with text that arrived meanwhile, after the clear part."""
    rig, shard_id, slot, _ = gated()
    assert rig.handle(SafetyDown()) == []
    assert rig.step(shard_id, (slot, [3], "ef")) == []
    screen = only(rig.handle(SafetyUp(False, True)), ScreenAnswers)
    assert screen.deltas == ["def"]
    [screening_slot] = screen.slots
    assert screen.skips == [(screening_slot, 3, "c")]
    step = sent(rig.handle(AnswersScreened([screening_slot], [6])))
    assert (step.token_ids, step.deltas) == ([2, 3], ["cdef"])
    assert only(rig.step(shard_id, (slot, [4], "g")), ScreenAnswers).skips == []


def test_an_answer_that_ended_meanwhile_is_judged_before_it_is_shown() -> None:
    """Its end is no reason to show the rest."""
    rig, shard_id, slot, _ = gated()
    rig.handle(SafetyDown())
    assert rig.finish(shard_id, slot) == []
    screen = only(rig.handle(SafetyUp(False, True)), ScreenAnswers)
    assert screen.close_slots == screen.slots
    step = sent(rig.handle(AnswersScreened([], [], [AnswerHalt(screen.slots[0], 3, "no")], screen.slots)))
    assert step.deltas == ["c"]
    assert step.finishes[0].reason == FinishReason.FINISH_REASON_CONTENT_FILTER
    assert rig.core.is_idle


def test_an_answer_that_was_being_closed_ends_when_all_is_clear() -> None:
    """The service died between the last text and its verdict."""
    rig, shard_id, slot, screening_slot = gated()
    rig.finish(shard_id, slot)
    assert sent(rig.handle(AnswersScreened([screening_slot], [4]))).deltas == ["cd"]
    rig.handle(SafetyDown())
    actions = rig.handle(SafetyUp(False, True))
    assert not has(actions, ScreenAnswers)
    assert sent(actions).finishes[0].reason == FinishReason.FINISH_REASON_STOP


def test_what_the_prefilter_clears_is_shown_all_the_same() -> None:
    """Most text needs no service. Text after suspicious text waits with it."""
    rig = CoreRig(safety=None)
    rig.handle(SafetyUp(False, True, Suspicious()))
    rig.add_shard()
    shard_id, [slot] = submitted(rig.submit())
    rig.start(shard_id, slot, 1, "ab")
    rig.handle(SafetyDown())
    assert sent(rig.step(shard_id, (slot, [2], "cd"))).deltas == ["cd"]
    assert rig.step(shard_id, (slot, [3], "x")) == []
    assert rig.step(shard_id, (slot, [4], "ef")) == []
    screen = only(rig.handle(SafetyUp(False, True, Suspicious())), ScreenAnswers)
    assert (screen.deltas, screen.skips) == (["xef"], [(screen.slots[0], 4, "d")])
    assert sent(rig.handle(AnswersScreened(screen.slots, [7]))).deltas == ["xef"]


def test_prompts_without_a_verdict_are_checked_again() -> None:
    """This includes prompts that were allowed while the verdict was in transit."""
    rig = CoreRig(safety=(True, False))
    rig.add_shard()
    shard_id, [slot] = submitted(rig.submit())
    rig.handle(SafetyDown())
    assert rig.start(shard_id, slot) == []
    check = only(rig.handle(SafetyUp(True, False)), CheckPrompt)
    assert sent(rig.handle(PromptVerdict(check.check_id, True))).deltas == ["a"]


@pytest.mark.parametrize("mode", ["gate", "async"])
def test_new_requests_wait_for_their_verdict(mode: str) -> None:
    """They are admitted and dispatched; the policy of the returned service applies to all of them."""
    rig = CoreRig(safety=(False, False), answer_mode=mode)
    rig.add_shard()
    rig.handle(SafetyDown())
    shard_id, [slot] = submitted(rig.submit())
    assert rig.start(shard_id, slot) == []
    actions = rig.handle(SafetyUp(True, True))
    assert only(actions, ScreenAnswers).deltas == ["a"]
    actions = rig.handle(PromptVerdict(only(actions, CheckPrompt).check_id, False, "no"))
    assert sent(actions).finishes[0].reason == FinishReason.FINISH_REASON_CONTENT_FILTER
    assert sent(actions).deltas == []


@pytest.mark.parametrize("required", [True, False])
def test_patience_ends(required: bool) -> None:
    """Then the configured handling of an absent service applies; another loss meanwhile does not extend the wait."""
    rig, shard_id, slot, _ = gated(safety_required=required, safety_patience_seconds=5.0)
    rig.handle(SafetyDown())
    assert rig.core.next_deadline() == rig.now + 5.0
    rig.now += 3.0
    rig.handle(SafetyDown())
    assert not has(rig.submit("new", slots=(2,)), SendStep)
    rig.now += 2.0
    steps = sent(rig.handle(Tick()))
    if required:
        assert [reason_name(finish.error.reason) for finish in steps.finishes if finish.error] == [
            "SAFETY_UNAVAILABLE"
        ] * 2
        assert steps.deltas == []
    else:
        assert steps.deltas == ["cd"]
        assert sent(rig.step(shard_id, (slot, [3], "ef"))).deltas == ["ef"]


def test_what_is_shown_before_it_is_judged_does_not_wait() -> None:
    """In async mode no output is kept that could be screened later."""
    rig = CoreRig(safety=(False, True), answer_mode="async")
    rig.add_shard()
    shard_id, [slot] = submitted(rig.submit())
    rig.start(shard_id, slot, 1, "ab")
    error = sent(rig.handle(SafetyDown())).finishes[0].error
    assert error is not None
    assert reason_name(error.reason) == "SAFETY_UNAVAILABLE"


def test_what_is_held_meanwhile_is_bounded() -> None:
    """An answer that grows past the bound ends before the patience does."""
    rig, shard_id, slot, _ = gated(max_uncleared_tokens=3)
    rig.handle(SafetyDown())
    rig.step(shard_id, (slot, [3], "e"))
    rig.step(shard_id, (slot, [4], "f"))
    error = sent(rig.step(shard_id, (slot, [5], "g"))).finishes[0].error
    assert error is not None
    assert reason_name(error.reason) == "SAFETY_UNAVAILABLE"
