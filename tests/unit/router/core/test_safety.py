"""Nothing unscreened is shown in gate mode, verdicts are enforced, and the service's absence has the configured
effect."""

from __future__ import annotations

from typing import Any

import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from router.core.actions import CancelOnShard, CheckPrompt, RequestEnded, ScreenAnswers, SendStep, SubmitAttempt
from router.core.events import AnswerHalt, AnswersScreened, PromptVerdict, SafetyDown, SafetyUp, ShardDown
from tests.fakes.core_rig import CoreRig, has, only, sent, submitted


def test_prompt_check_runs_beside_prefill() -> None:
    """The check takes no extra time unless it is slower than prefill: tokens wait for it, dispatch does not."""
    rig = CoreRig(safety=(True, False))
    rig.add_shard()
    actions = rig.submit(tenant="t")
    check = only(actions, CheckPrompt)
    assert (check.text, check.tenant) == ("text", "t")
    shard_id, [slot] = submitted(actions)
    assert rig.start(shard_id, slot, delta="a") == []
    assert rig.step(shard_id, (slot, [8], "b")) == []
    rig.now = 4.0
    step = sent(rig.handle(PromptVerdict(check.check_id, True)))
    assert (step.slots, step.num_tokens, step.token_ids, step.deltas) == ([1], [2], [7, 8], ["ab"])
    assert [start.slot for start in step.starts] == [1]
    assert sent(rig.step(shard_id, (slot, [9], "c"))).token_ids == [9]
    assert only(rig.finish(shard_id, slot), RequestEnded).ttft_seconds == 3.0


def test_blocked_prompt() -> None:
    """A blocked prompt gets the policy's message and nothing of the answer; the shard stops."""
    rig = CoreRig(safety=(True, False))
    rig.add_shard()
    actions = rig.submit(slots=(1, 2))
    shard_id, slots = submitted(actions)
    rig.start(shard_id, slots[0])
    actions = rig.handle(PromptVerdict(only(actions, CheckPrompt).check_id, False, "not here"))
    step = sent(actions)
    assert (step.slots, step.starts) == ([], [])
    for finish in step.finishes:
        assert finish.reason == FinishReason.FINISH_REASON_CONTENT_FILTER
        assert finish.error is not None
        assert finish.error.reason == ErrorReason.ERROR_REASON_CONTENT_FILTERED
        assert finish.error.message == "not here"
        assert finish.num_output_tokens == 0
    assert only(actions, CancelOnShard).slots == slots
    assert only(actions, RequestEnded).num_output_tokens == 0


@pytest.mark.parametrize("required", [True, False])
def test_a_prompt_whose_rule_failed_counts_as_unchecked(required: bool) -> None:
    """One request is treated as if the service were away, by the operator's choice; the service itself stays up."""
    rig = CoreRig(safety=(True, False), safety_required=required)
    rig.add_shard()
    actions = rig.submit()
    shard_id, [slot] = submitted(actions)
    rig.start(shard_id, slot)
    verdict = PromptVerdict(only(actions, CheckPrompt).check_id, allowed=False, rule_failed=True)
    finishes = sent(rig.handle(verdict)).finishes
    if required:
        assert [finish.error.reason for finish in finishes if finish.error is not None] == [
            ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE
        ]
    else:
        assert not finishes
        assert only(rig.finish(shard_id, slot), RequestEnded).reason == FinishReason.FINISH_REASON_STOP
    assert has(rig.submit("other", slots=(2,)), CheckPrompt)


@pytest.mark.parametrize("required", [True, False])
def test_an_answer_whose_rule_failed_counts_as_unscreened(required: bool) -> None:
    """Nothing more of it is shown where screening is required; otherwise what was withheld is shown."""
    rig = CoreRig(safety=(False, True), safety_required=required)
    rig.add_shard()
    shard_id, [slot] = submitted(rig.submit())
    [screening_slot] = only(rig.start(shard_id, slot, 7, "hidden"), ScreenAnswers).slots
    actions = rig.handle(AnswersScreened([], [], [AnswerHalt(screening_slot, 0, "", rule_failed=True)]))
    step = sent(actions)
    if required:
        assert not any(step.deltas)
        assert [finish.error.reason for finish in step.finishes if finish.error is not None] == [
            ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE
        ]
    else:
        assert "".join(step.deltas) == "hidden"
        assert not step.finishes
    assert only(actions, ScreenAnswers).close_slots == [screening_slot]


class HoldsX:
    """A prompt filter: only prompts with an x need to be checked."""

    def is_suspicious(self, text: str) -> bool:
        return "x" in text


def test_prompts_that_the_filter_clears_are_not_sent() -> None:
    """They would be allowed: nothing is withheld for a verdict, and the service is not sent their text. Other prompts
    are checked, and so are all once a policy without a filter is in force."""
    rig = CoreRig(safety=None)
    rig.handle(SafetyUp(True, False, prompt_filter=HoldsX()))
    rig.add_shard()
    actions = rig.submit("r1", slots=(1,), prompt_text="plain")
    assert not has(actions, CheckPrompt)
    shard_id, [slot] = submitted(actions)
    assert sent(rig.start(shard_id, slot)).deltas == ["a"]
    assert only(rig.submit("r2", slots=(2,), prompt_text="x"), CheckPrompt).text == "x"
    rig.handle(SafetyUp(True, False))
    assert has(rig.submit("r3", slots=(3,), prompt_text="plain"), CheckPrompt)


def test_whole_answer_may_wait_for_the_prompt_verdict() -> None:
    """A verdict slower than the answer still comes first."""
    rig = CoreRig(safety=(True, False))
    rig.add_shard()
    actions = rig.submit()
    shard_id, [slot] = submitted(actions)
    rig.start(shard_id, slot)
    assert rig.finish(shard_id, slot) == []
    actions = rig.handle(PromptVerdict(only(actions, CheckPrompt).check_id, True))
    assert sent(actions).finishes[0].num_output_tokens == 1
    assert has(actions, RequestEnded)


def gated() -> tuple[CoreRig, str, int]:
    """A running request whose answer is gated."""
    rig = CoreRig(safety=(False, True))
    rig.add_shard()
    shard_id, [slot] = submitted(rig.submit())
    return rig, shard_id, slot


def test_gate_releases_whole_tokens_up_to_what_is_clear() -> None:
    """Text is shown as far as it is clear, and a token only with all of its text."""
    rig, shard_id, slot = gated()
    actions = rig.start(shard_id, slot, 1, "abc")
    screen = only(actions, ScreenAnswers)
    assert screen.deltas == ["abc"]
    assert not has(actions, SendStep)
    rig.step(shard_id, (slot, [2], "de"))
    [screening_slot] = screen.slots
    assert rig.handle(AnswersScreened([screening_slot], [2])) == []
    assert sent(rig.handle(AnswersScreened([screening_slot], [4]))).token_ids == [1]
    assert rig.handle(AnswersScreened([screening_slot], [3])) == []
    actions = rig.finish(shard_id, slot)
    assert only(actions, ScreenAnswers).close_slots == [screening_slot]
    assert not has(actions, SendStep)
    step = sent(rig.handle(AnswersScreened([], [], closed_slots=[screening_slot])))
    assert (step.token_ids, step.deltas) == ([2], ["de"])
    assert step.finishes[0].num_output_tokens == 2
    assert rig.core.is_idle


def test_gate_halt_cuts_the_text() -> None:
    """After the halt nothing is shown or metered; a delta that straddles it is cut, and its token is dropped."""
    rig, shard_id, slot = gated()
    [screening_slot] = only(rig.start(shard_id, slot, 1, "ab"), ScreenAnswers).slots
    rig.step(shard_id, (slot, [2], "cdef"))
    rig.step(shard_id, (slot, [3], "gh"))
    actions = rig.handle(AnswersScreened([], [], [AnswerHalt(screening_slot, 4, "stop")]))
    step = sent(actions)
    assert (step.token_ids, step.deltas, step.num_tokens) == ([1], ["abcd"], [])
    [finish] = step.finishes
    assert finish.reason == FinishReason.FINISH_REASON_CONTENT_FILTER
    assert finish.num_output_tokens == 1
    assert only(actions, CancelOnShard).slots == [slot]
    assert only(actions, ScreenAnswers).close_slots == [screening_slot]
    assert only(actions, RequestEnded).num_output_tokens == 1


def test_answer_without_text_needs_no_verdict() -> None:
    """An answer that ends before it has text has nothing to screen."""
    rig, shard_id, slot = gated()
    rig.start(shard_id, slot, 1, "")
    actions = rig.finish(shard_id, slot)
    assert sent(actions).finishes[0].num_output_tokens == 1
    assert not has(actions, ScreenAnswers)


def test_async_shows_at_once_and_halts() -> None:
    """In async mode earlier text was sent when the halt arrives; the rest is not sent, and the client learns how much
    it has too many."""
    rig = CoreRig(safety=(False, True), answer_mode="async")
    rig.add_shard()
    shard_id, [slot] = submitted(rig.submit())
    actions = rig.start(shard_id, slot, 1, "ab")
    assert sent(actions).deltas == ["ab"]
    [screening_slot] = only(actions, ScreenAnswers).slots
    actions = rig.handle(AnswersScreened([], [], [AnswerHalt(screening_slot, 1, "stop")]))
    [finish] = sent(actions).finishes
    assert (finish.reason, finish.num_retracted_chars) == (FinishReason.FINISH_REASON_CONTENT_FILTER, 1)
    assert has(actions, CancelOnShard)


@pytest.mark.parametrize(("config", "screens_answers"), [({"answer_mode": "off"}, True), ({}, False)])
def test_answers_are_not_screened_without_a_rule_or_mode(config: dict[str, Any], screens_answers: bool) -> None:
    """Without a rule or a mode for answers, screening costs nothing."""
    rig = CoreRig(safety=(True, screens_answers), **config)
    rig.add_shard()
    actions = rig.submit()
    shard_id, [slot] = submitted(actions)
    rig.handle(PromptVerdict(only(actions, CheckPrompt).check_id, True))
    actions = rig.start(shard_id, slot)
    assert not has(actions, ScreenAnswers)
    assert sent(actions).token_ids == [7]


@pytest.mark.parametrize("required", [True, False])
def test_safety_lost_in_mid_answer(required: bool) -> None:
    """Fail-closed ends answers that can no longer be screened; fail-open shows them."""
    rig = CoreRig(safety=(True, True), safety_required=required, safety_patience_seconds=0.0)
    rig.add_shard()
    actions = rig.submit()
    shard_id, [slot] = submitted(actions)
    rig.start(shard_id, slot, 1, "ab")
    actions = rig.handle(SafetyDown())
    step = sent(actions)
    if required:
        [finish] = step.finishes
        assert finish.error is not None
        assert finish.error.reason == ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE
        assert (step.token_ids, finish.num_output_tokens) == ([], 0)
        assert only(actions, CancelOnShard).slots == [slot]
    else:
        assert step.deltas == ["ab"]
        rig.handle(SafetyUp(True, True))
        assert sent(rig.step(shard_id, (slot, [2], "c"))).deltas == ["c"]


def test_unscreened_requests_survive_the_loss() -> None:
    """A request whose prompt was allowed and whose answer needs no screening does not depend on the service."""
    rig = CoreRig(safety=(True, False))
    rig.add_shard()
    actions = rig.submit()
    shard_id, [slot] = submitted(actions)
    rig.handle(PromptVerdict(only(actions, CheckPrompt).check_id, True))
    assert rig.handle(SafetyDown()) == []
    assert sent(rig.start(shard_id, slot)).token_ids == [7]


def test_held_tokens_are_bounded() -> None:
    """A safety service that never answers must not fill the router's memory."""
    rig = CoreRig(safety=(True, False), max_uncleared_tokens=2)
    rig.add_shard()
    shard_id, [slot] = submitted(rig.submit())
    rig.start(shard_id, slot)
    rig.step(shard_id, (slot, [1], "b"))
    actions = rig.step(shard_id, (slot, [2], "c"))
    error = sent(actions).finishes[0].error
    assert error is not None
    assert error.reason == ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE


def test_failover_behind_held_text() -> None:
    """Withheld output is not generated twice: the next attempt continues after it, under the same screening."""
    rig, _, slot = gated()
    rig.add_shard("s1")
    [screening_slot] = only(rig.start("s0", slot, 1, "ab"), ScreenAnswers).slots
    attempt = only(rig.handle(ShardDown("s0")), SubmitAttempt)
    [choice] = attempt.choices
    assert (choice.output_token_ids, choice.num_delivered_chars) == ((1,), 2)
    assert only(rig.step("s1", (choice.slot, [2], "cd")), ScreenAnswers).slots == [screening_slot]
    assert sent(rig.handle(AnswersScreened([screening_slot], [4]))).deltas == ["abcd"]


@pytest.mark.parametrize("is_halt", [True, False])
def test_text_that_does_not_exist_cannot_be_cleared(is_halt: bool) -> None:
    """A garbled verdict must not clear what the model writes next: nothing changes, and the stream is to be broken."""
    rig, shard_id, slot = gated()
    [screening_slot] = only(rig.start(shard_id, slot, 1, "abc"), ScreenAnswers).slots
    halts = [AnswerHalt(screening_slot, 4, "no")] if is_halt else []
    slots = [] if is_halt else [screening_slot]
    with pytest.raises(KvloomError, match="does not exist"):
        rig.handle(AnswersScreened(slots, [4] * len(slots), halts))
    assert not has(rig.step(shard_id, (slot, [2], "de")), SendStep)
    assert sent(rig.handle(AnswersScreened([screening_slot], [5]))).deltas == ["abcde"]


def test_verdicts_for_ended_requests_are_ignored() -> None:
    """A verdict may cross with the end of its request."""
    rig = CoreRig(safety=(True, True))
    assert rig.handle(PromptVerdict(9, False, "x")) == []
    assert rig.handle(AnswersScreened([5], [1], [AnswerHalt(6, 0, "x")], [7])) == []


def test_a_stop_string_is_screened_with_the_text_before_it() -> None:
    """Clients learn which stop string has ended an answer, so it is a part of what they can read."""
    rig = CoreRig(safety=(False, True))
    rig.add_shard()
    shard_id, [slot] = submitted(rig.submit())
    actions = rig.start(shard_id, slot, delta="launch ")
    [screened] = only(actions, ScreenAnswers).slots
    rig.handle(AnswersScreened([screened], [0], [], []))
    actions = rig.finish(shard_id, slot, stop_string="code")
    screening = only(actions, ScreenAnswers)
    assert (screening.slots, screening.deltas, screening.close_slots) == ([screened], ["code"], [screened])
    assert not has(actions, SendStep)
    halt = AnswerHalt(screened, 0, "not here")
    [finish] = sent(rig.handle(AnswersScreened([], [], [halt], [screened]))).finishes
    assert (finish.reason, finish.stop_string) == (FinishReason.FINISH_REASON_CONTENT_FILTER, "")


def test_a_stop_string_waits_for_a_service_that_is_away() -> None:
    """Its successor judges it with the text that is withheld."""
    rig = CoreRig(safety=(False, True), safety_patience_seconds=5.0)
    rig.add_shard()
    shard_id, [slot] = submitted(rig.submit())
    rig.start(shard_id, slot, delta="launch ")
    rig.handle(SafetyDown())
    assert not has(rig.finish(shard_id, slot, stop_string="code"), SendStep)
    screening = only(rig.handle(SafetyUp(screens_prompts=False, screens_answers=True)), ScreenAnswers)
    assert screening.deltas == ["launch code"]
    assert screening.close_slots == screening.slots
