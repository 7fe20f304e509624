"""What placements predict is kept with the request, and judged by what happens to it."""

from __future__ import annotations

from typing import Any

import pytest

from router.core.actions import RequestEnded
from router.core.events import LoadReported, ShardDown, ShardLoad
from router.core.frames import Start
from router.core.load.prediction import JudgedTerm
from tests.fakes.core_rig import CoreRig, only, submitted

ANSWER = 5
STEP_SECONDS = 0.02


def rig_with_known_speed(**config: Any) -> CoreRig:
    """One shard, which has shown that it prefills such a prompt in 20 ms and answers with 5 tokens."""
    rig = CoreRig(**config)
    rig.add_shard(max_model_len=10_000, num_blocks=10_000)
    rig.handle(LoadReported("s0", ShardLoad(num_available_blocks=10_000, decode_step_seconds=STEP_SECONDS)))
    for number in range(40):
        run(rig, f"seen{number}", 0.02)
    return rig


def run(rig: CoreRig, name: str, prefill: float, queue: float = 0.0, decode: float = 0.0) -> RequestEnded:
    slot = submitted(rig.submit(name, prompt_token_ids=prompt(name)))[1][0]
    rig.now += queue + prefill
    rig.step("s0", (slot, [7] * ANSWER, "a" * ANSWER), starts=[Start(slot, 0, queue)])
    rig.now += decode
    return only(rig.finish("s0", slot), RequestEnded)


def prompt(name: str) -> list[int]:
    """80 tokens that no other prompt has."""
    return [1000 + 100 * int(name.removeprefix("seen")) + number for number in range(80)]


def judged(ended: RequestEnded) -> dict[str, JudgedTerm]:
    return {one.term: one for one in ended.judged_prediction}


def test_each_term_is_judged_by_what_happened() -> None:
    """Where the time was lost is what an operator asks: in the queue, in the prefill, or while decoding."""
    terms = judged(run(rig_with_known_speed(), "seen900", prefill=0.05, queue=0.3, decode=0.5))
    assert list(terms) == ["waiting", "prefill", "ttft", "decoding", "end"]
    assert terms["waiting"].predicted_seconds == pytest.approx(0.0, abs=1e-6)
    assert terms["waiting"].actual_seconds == pytest.approx(0.3)
    assert terms["prefill"].predicted_seconds == pytest.approx(0.02, rel=0.2)
    assert terms["prefill"].actual_seconds == pytest.approx(0.05)
    assert terms["ttft"].actual_seconds == pytest.approx(0.35)
    assert terms["ttft"].error_seconds == pytest.approx(0.33, abs=0.005)
    assert terms["decoding"].predicted_seconds >= (ANSWER - 1) * STEP_SECONDS
    assert terms["decoding"].actual_seconds == pytest.approx(0.5)
    assert terms["end"].actual_seconds == pytest.approx(0.85)
    assert terms["end"].predicted_seconds == pytest.approx(
        terms["ttft"].predicted_seconds + terms["decoding"].predicted_seconds
    )


def test_waiting_in_the_router_is_predicted_and_judged() -> None:
    """The prediction is of the first placement: the time that a request then waits here for its shard is part of it,
    not the moment from which it counts."""
    rig = rig_with_known_speed(prefill_chunks=None)
    busy = submitted(rig.submit("busy", prompt_token_ids=list(range(8_000)), max_tokens=5))[1][0]
    rig.submit("late", slots=(2,), prompt_token_ids=prompt("seen901"), max_tokens=5)
    assert rig.core.num_queued_requests == 1, "what is there already keeps the shard busy for long"
    rig.now += 1.0
    actions = rig.step("s0", (busy, [7], "a"), starts=[Start(busy, 0, 0.0)])
    slot = submitted(actions)[1][0]
    rig.now += 0.02
    rig.step("s0", (slot, [7], "a"), starts=[Start(slot, 0, 0.0)])
    terms = judged(only(rig.finish("s0", slot), RequestEnded))
    assert terms["waiting"].predicted_seconds > 0.5
    assert terms["waiting"].actual_seconds == pytest.approx(1.0)


def test_what_cannot_be_told_is_not_judged() -> None:
    """A request that lost its shard was not late because its prediction was wrong, and the end of one that was given
    up says nothing about its length."""
    rig = rig_with_known_speed()
    submitted(rig.submit("moved", prompt_token_ids=prompt("seen1"), max_tokens=5))
    rig.add_shard("s1", max_model_len=10_000, num_blocks=10_000)
    slot = submitted(rig.handle(ShardDown("s0")))[1][0]
    rig.step("s1", (slot, [7], "a"), starts=[Start(slot, 0, 0.0)])
    terms = judged(only(rig.finish("s1", slot), RequestEnded))
    assert {one.actual_seconds for one in terms.values()} == {None}
    assert terms["ttft"].predicted_seconds > 0
    assert terms["ttft"].error_seconds is None


def test_nothing_is_predicted_for_what_is_never_placed() -> None:
    """A refused request has no shard, so there is no figure to be wrong."""
    rig = CoreRig()
    assert only(rig.submit(model="unknown"), RequestEnded).judged_prediction == []
