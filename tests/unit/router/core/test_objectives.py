"""Deadlines and objectives: what is refused at once, what ends, and what never does."""

from __future__ import annotations

from typing import Any

import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.text.block_hash import block_hashes, root_hash
from router.core.actions import Action, RequestEnded, SubmitAttempt
from router.core.events import (
    ChoiceSpec,
    KvChange,
    KvEventsArrived,
    LoadReported,
    RequestCancelled,
    ShardDown,
    ShardLoad,
    Tick,
)
from router.core.frames import Start
from router.core.objectives import Cause, Objectives
from tests.fakes.core_rig import CoreRig, has, only, sent, submitted

PREFILL_SECONDS = 0.02


def rig_with_known_speed(**config: Any) -> CoreRig:
    """One idle shard, whose prefill of such a prompt takes about 20 ms, as the core has seen."""
    rig = CoreRig(**config)
    rig.add_shard()
    for number in range(20):
        slot = submitted(rig.submit(f"seen{number}", prompt_token_ids=new_prompt(number)))[1][0]
        rig.now += PREFILL_SECONDS
        rig.step("s0", (slot, [7], "a"), starts=[Start(slot, 0, 0.0)])
        rig.finish("s0", slot)
    return rig


def error_of(actions: list[Action]) -> KvloomError:
    error = sent(actions).finishes[0].error
    assert error is not None
    return error


def new_prompt(number: int = 90) -> list[int]:
    return [number * 100 + i for i in range(80)]


@pytest.mark.parametrize("objectives", [Objectives(ttft_seconds=0.005), Objectives(deadline_seconds=0.005)])
def test_what_even_an_idle_shard_cannot_do_is_refused_for_good(objectives: Objectives) -> None:
    """A retry would be refused, too, so the error must not ask for one."""
    rig = rig_with_known_speed()
    actions = rig.submit(prompt_token_ids=new_prompt(), objectives=objectives)
    error = error_of(actions)
    assert error.reason == ErrorReason.ERROR_REASON_DEADLINE_IMPOSSIBLE
    assert not error.retry_after_seconds
    assert not has(actions, SubmitAttempt)


def test_what_only_the_load_prevents_is_refused_for_a_while() -> None:
    """The fleet would meet the objective later, so the caller is told when to come again."""
    rig = rig_with_known_speed()
    for number in range(3):
        rig.submit(f"busy{number}", slots=(10 + number,), prompt_token_ids=new_prompt(70 + number))
    error = error_of(rig.submit(prompt_token_ids=new_prompt(), objectives=Objectives(ttft_seconds=0.03)))
    assert error.reason == ErrorReason.ERROR_REASON_QUEUE_FULL
    assert error.retry_after_seconds > 0


def test_a_possible_objective_is_admitted() -> None:
    """Objectives that can be met must cost a request nothing."""
    rig = rig_with_known_speed()
    assert has(
        rig.submit(prompt_token_ids=new_prompt(), objectives=Objectives(60.0, 5.0, 1.0)),
        SubmitAttempt,
    )


def test_without_observations_nothing_is_refused() -> None:
    """The prediction of a shard that has computed nothing yet is a guess, on which no request may be refused."""
    rig = CoreRig()
    rig.add_shard()
    assert has(rig.submit(objectives=Objectives(ttft_seconds=1e-6)), SubmitAttempt)


def test_a_slow_shard_gets_another_chance() -> None:
    """If every request were refused because a shard was slow once, it could never show that it has recovered."""
    rig = rig_with_known_speed()
    objectives = Objectives(ttft_seconds=0.005)
    assert has(rig.submit("a", prompt_token_ids=new_prompt(), objectives=objectives), RequestEnded)
    rig.now += 31.0
    assert has(rig.submit("b", prompt_token_ids=new_prompt(), objectives=objectives), SubmitAttempt)


@pytest.mark.parametrize(
    "changes",
    [
        {"objectives": Objectives(ttft_seconds=0.005, is_admitted=True)},
        {"objectives": Objectives(ttft_seconds=0.005), "choices": [ChoiceSpec(1, 0, [7], 1)]},
    ],
)
def test_a_request_that_another_router_had_is_not_refused_as_impossible(changes: dict[str, Any]) -> None:
    """Its client has been promised an answer, and may have a part of it."""
    assert has(rig_with_known_speed().submit(prompt_token_ids=new_prompt(), **changes), SubmitAttempt)


def test_a_waiting_request_ends_at_its_deadline_with_nothing_computed() -> None:
    """Its caller has stopped waiting for it: no shard may compute it after that."""
    rig = CoreRig(policy="least_requests")
    rig.add_shard(max_batch=1)
    rig.submit("runs", slots=(10,))
    rig.submit("next", slots=(11,))
    assert not has(rig.submit("late", slots=(12,), objectives=Objectives(deadline_seconds=1.5)), RequestEnded)
    rig.now += 1.5
    actions = rig.handle(Tick())
    assert error_of(actions).reason == ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED
    assert only(actions, RequestEnded).num_attempts == 0


def test_a_running_answer_ends_at_its_deadline() -> None:
    """It ends as one that exceeds its timeout does, also after it has moved to another shard."""
    rig = CoreRig()
    rig.add_shard()
    rig.add_shard("s1")
    shard_id, slots = submitted(rig.submit(objectives=Objectives(deadline_seconds=4.0)))
    rig.start(shard_id, slots[0])
    rig.now += 2.0
    assert has(rig.handle(ShardDown(shard_id)), SubmitAttempt)
    rig.now += 2.0
    assert error_of(rig.handle(Tick())).reason == ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED


def test_time_that_passed_elsewhere_counts() -> None:
    """A continuation at another router has what is left of its deadline."""
    rig = CoreRig()
    rig.add_shard()
    objectives = Objectives(deadline_seconds=4.0, elapsed_seconds=3.0)
    shard_id, slots = submitted(rig.submit(objectives=objectives))
    rig.start(shard_id, slots[0])
    rig.now += 1.0
    assert error_of(rig.handle(Tick())).reason == ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED


def test_a_request_that_comes_after_its_deadline_is_refused() -> None:
    """It must not be sent to a shard only to be ended there."""
    rig = CoreRig()
    rig.add_shard()
    actions = rig.submit(objectives=Objectives(deadline_seconds=1.0, elapsed_seconds=1.0))
    assert error_of(actions).reason == ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED
    assert not has(actions, SubmitAttempt)


def test_a_missed_ttft_never_ends_an_answer() -> None:
    """Scheduling never ends a stream: only the caller's own deadline does."""
    rig = CoreRig()
    rig.add_shard()
    shard_id, slots = submitted(rig.submit(objectives=Objectives(ttft_seconds=0.1, tpot_seconds=0.001)))
    rig.now += 5.0
    assert not has(rig.handle(Tick()), RequestEnded)
    rig.start(shard_id, slots[0])
    assert only(rig.handle(RequestCancelled("r")), RequestEnded).num_output_tokens == 1


def test_the_earliest_ttft_goes_first() -> None:
    """Within a tenant and a class, requests with objectives go in the order of their deadlines, before the others."""
    rig = CoreRig()
    rig.add_shard(max_batch=1)
    shard_id, running = submitted(rig.submit("first", slots=(10,)))
    running += submitted(rig.submit("second", slots=(11,)))[1]
    rig.submit("plain", slots=(12,), prompt_token_ids=[8])
    rig.submit("lax", slots=(13,), objectives=Objectives(ttft_seconds=9.0))
    rig.submit("urgent", slots=(14,), objectives=Objectives(ttft_seconds=2.0))
    rig.submit("tpot", slots=(15,), objectives=Objectives(tpot_seconds=2.0), prompt_token_ids=[9] * 6)
    assert order_of(rig, shard_id, running, 4) == ["urgent", "lax", "plain", "tpot"]


def test_a_missed_objective_loses_its_precedence_and_waiting_earns_it() -> None:
    """Nothing saves what is late already, and a request without an objective must not wait for ever."""
    rig = CoreRig(policy="least_requests")
    rig.add_shard(max_batch=1)
    shard_id, running = submitted(rig.submit("first", slots=(10,)))
    running += submitted(rig.submit("second", slots=(11,)))[1]
    rig.submit("patient", slots=(12,))
    rig.now += 31.0
    rig.submit("plain", slots=(13,))
    rig.submit("missed", slots=(14,), objectives=Objectives(ttft_seconds=0.5))
    rig.now += 1.0
    rig.submit("urgent", slots=(15,), objectives=Objectives(ttft_seconds=2.0))
    assert order_of(rig, shard_id, running, 4) == ["patient", "urgent", "plain", "missed"]


def order_of(rig: CoreRig, shard_id: str, running: list[int], num_requests: int) -> list[str]:
    """Which requests are sent as those before them end."""
    order: list[str] = []
    while len(order) < num_requests:
        slot = running.pop(0)
        rig.start(shard_id, slot)
        for action in rig.finish(shard_id, slot):
            if isinstance(action, SubmitAttempt):
                order.append(action.request.request_id)
                running += [choice.slot for choice in action.choices]
    return order


def test_a_shard_in_time_is_preferred_to_a_cheaper_one() -> None:
    """Attaining the objective comes first, and the cost of the placement policy after it."""
    for objectives, expected in ((None, "s0"), (Objectives(tpot_seconds=0.05), "s1")):
        rig = CoreRig()
        rig.add_shard()
        rig.add_shard("s1")
        for shard_id, step_seconds in (("s0", 0.1), ("s1", 0.01)):
            rig.handle(LoadReported(shard_id, ShardLoad(num_available_blocks=100, decode_step_seconds=step_seconds)))
        rig.handle(KvEventsArrived("s0", 1, [KvChange(stored=list(block_hashes(new_prompt(1), 4, root_hash("m"))))]))
        picked = submitted(rig.submit("r", prompt_token_ids=new_prompt(1), objectives=objectives))[0]
        assert picked == expected


def test_the_end_of_a_request_says_which_objectives_were_met() -> None:
    """Metrics and explanations have nothing else to go by."""
    rig = rig_with_known_speed()
    shard_id, slots = submitted(rig.submit(prompt_token_ids=new_prompt(), objectives=Objectives(9.0, 0.1, 0.5)))
    rig.now += 0.02
    rig.start(shard_id, slots[0])
    rig.now += 2.0
    rig.step(shard_id, (slots[0], [8], "b"))
    outcome = only(rig.finish(shard_id, slots[0]), RequestEnded).objectives
    assert outcome is not None
    assert (outcome.deadline_met, outcome.ttft_met, outcome.tpot_met) == (True, True, False)
    assert 0.01 < (outcome.predicted_ttft_seconds or 0.0) < 0.03
    refused = only(rig.submit(prompt_token_ids=new_prompt(8), objectives=Objectives(0.001)), RequestEnded).objectives
    assert refused is not None
    assert (refused.refused, refused.deadline_met) == (Cause.SPEED, None)
