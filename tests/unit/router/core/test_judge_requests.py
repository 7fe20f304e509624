"""Questions to models that judge texts: they never wait for what waits for them."""

from __future__ import annotations

from typing import Any

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from router.core.actions import Action, CheckPrompt, RequestEnded, SequencesPreempted, SubmitAttempt
from router.core.events import JUDGE_CLIENT_ID, DrainStarted, Tick, TierRank
from router.core.priority_classes import INTERACTIVE, JUDGE, PriorityClass
from router.core.rule_settings import FairnessSettings
from tests.fakes.core_rig import CoreRig, has, only, sent, submitted

FAIRNESS = FairnessSettings(preempt_after_seconds=0.25, contention_seconds=10.0)


def question(rig: CoreRig, name: str = "q", slot: int = 1, **changes: Any) -> list[Action]:
    fields = {"client_id": JUDGE_CLIENT_ID, "tier": TierRank.JUDGE, "prompt_text": "", "slots": (slot,)}
    return rig.submit(name, **(fields | changes))


def test_nobody_judges_a_judge() -> None:
    """Its request is sent at once and never checked, and its answer is not withheld."""
    rig = CoreRig(safety=(True, True))
    rig.add_shard()
    assert has(rig.submit("judged"), CheckPrompt)
    actions = question(rig)
    assert not has(actions, CheckPrompt)
    shard_id, [slot] = submitted(actions)
    assert sent(rig.start(shard_id, slot, delta="safe")).deltas == ["safe"]


def fill(rig: CoreRig, num_requests: int) -> dict[str, int]:
    """Submits requests that wait for a verdict. Returns the slots of those that were sent to the shard."""
    slots: dict[str, int] = {}
    for number in range(num_requests):
        actions = rig.submit(f"judged-{number}", slots=(number + 10,), max_tokens=90)
        if has(actions, SubmitAttempt):
            slots[f"judged-{number}"] = submitted(actions)[1][0]
    return slots


def test_a_question_goes_first_and_finds_a_place() -> None:
    """Requests that wait give up their places in the queue, and the next free place of the shard is the question's."""
    rig = CoreRig(safety=(True, False), max_queued_requests=2, policy="least_requests")
    rig.add_shard(max_batch=1)
    slots = fill(rig, 12)
    ended = [one.request_id for one in rig.log if isinstance(one, RequestEnded)]
    assert len(slots) + 2 + len(ended) == 12
    assert ended, "the queue is full"
    assert only(question(rig), RequestEnded).error_reason == ErrorReason.ERROR_REASON_QUEUE_FULL
    first = next(iter(slots.values()))
    rig.start("s0", first)
    assert only(rig.finish("s0", first), SubmitAttempt).request.request_id == "q"


def test_a_full_shard_makes_room_for_a_question() -> None:
    """All places are taken by requests that wait for this judge, and none of them would end for long: with a declared
    class, one of them makes room, and later ones leave the judge's part free."""
    judge = PriorityClass(JUDGE.name, 0, reserved_share=0.25)
    rig = CoreRig(safety=(True, False), classes=(judge, INTERACTIVE), fairness=FAIRNESS, policy="least_requests")
    rig.add_shard(max_batch=4)
    slots = fill(rig, 8)
    for slot in list(slots.values())[:4]:
        rig.start("s0", slot)
    question(rig, priority_class=judge)
    rig.now += 0.3
    gone = only(rig.handle(Tick()), SequencesPreempted).slots
    for slot in gone:
        rig.finish("s0", slot, FinishReason.FINISH_REASON_CANCELLED)
    sent_names = [one.request.request_id for one in rig.log if isinstance(one, SubmitAttempt)]
    assert "q" in sent_names
    assert not has(rig.log, RequestEnded)
    assert not has(rig.submit("later", slots=(99,)), SubmitAttempt)


def test_a_question_is_answered_while_the_router_drains() -> None:
    """Requests that run on while the router stops may still wait for a judgement."""
    rig = CoreRig(safety=(True, False))
    rig.add_shard()
    rig.submit("judged")
    rig.handle(DrainStarted())
    assert has(question(rig), SubmitAttempt)
    assert only(rig.submit("late", slots=(2,)), RequestEnded).error_reason == ErrorReason.ERROR_REASON_DRAINING
