"""What a brownout does in the router core: new requests are degraded or refused, running answers never are."""

from __future__ import annotations

from typing import Any

import pytest

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import (
    FINISH_REASON_LENGTH,
    RESULT_CACHE_USE_HIT,
    FinishReason,
    Pooling,
    SamplingParams,
    StopConditions,
)
from kvloom_common.config import BrownoutStepConfig
from router import convert
from router.core.actions import (
    AnswerCompleted,
    BrownoutStepChanged,
    FleetChanged,
    RequestDegraded,
    RequestEnded,
    SubmitAttempt,
)
from router.core.events import (
    CachedChoice,
    ChoiceSpec,
    Request,
    RequestArrived,
    RequestCancelled,
    ShardDown,
    Tick,
    TierRank,
)
from router.core.frames import Finish
from router.core.rule_settings import BrownoutSettings
from tests.fakes.core_rig import CoreRig, has, only, sent, submitted

LADDER = [
    BrownoutStepConfig(max_tokens=6, no_speculation=True),
    BrownoutStepConfig(max_tokens=3, max_choices=1, smaller_model=True, applies_to=["interactive"]),
    BrownoutStepConfig(shed=["batch"]),
]


def degraded_rig(step: int, **config: Any) -> CoreRig:
    """A router whose model is on a step of the ladder, after requests that waited too long."""
    settings = BrownoutSettings(
        enabled=True,
        ttft_slo_seconds=0.5,
        fast_window_seconds=1.0,
        slow_window_seconds=10.0,
        min_requests=1,
        min_step_seconds=1.2,
        hold_seconds=5.0,
        steps=LADDER,
    )
    rig = CoreRig(brownout=settings, policy="least_requests", **config)
    rig.add_shard(max_batch=50)
    for number in range(step):
        _, (slot,) = submitted(rig.submit(f"slow-{number}", slots=(1000 + number,)))
        rig.now += 1.3
        change = only(rig.start("s0", slot), BrownoutStepChanged)
        assert (change.step, change.previous_step) == (number + 1, number)
        rig.finish("s0", slot)
    return rig


def test_answers_are_capped_and_say_so() -> None:
    """The shard gets the lower limit, the client hears of it with the first token, and the record has what it asked
    for. A request that asks for less is not touched."""
    rig = degraded_rig(1)
    actions = rig.submit("long", slots=(1,), max_tokens=10)
    attempt = only(actions, SubmitAttempt)
    assert attempt.max_tokens == 6
    assert attempt.request.degradation is not None
    assert attempt.request.degradation.no_speculation
    assert only(actions, RequestDegraded) == RequestDegraded("m", ("max_tokens", "no_speculation"))
    slot = submitted(actions)[1][0]
    assert sent(rig.start("s0", slot)).starts[0].brownout == "1; max_tokens=6; no_speculation"
    assert only(rig.finish("s0", slot, FINISH_REASON_LENGTH), RequestEnded).max_tokens == 10
    short = only(rig.submit("short", slots=(2,), max_tokens=4), SubmitAttempt)
    assert short.max_tokens == 4
    assert str(short.request.degradation) == "1; no_speculation"
    assert only(rig.submit("any", slots=(3,), max_tokens=None), SubmitAttempt).max_tokens == 6


def test_without_overload_nothing_is_degraded() -> None:
    """A router with a brownout ladder serves as one without, as long as requests are served in time."""
    rig = degraded_rig(0)
    actions = rig.submit("r", slots=(1,))
    assert only(actions, SubmitAttempt).max_tokens == 10
    assert sent(rig.start("s0", submitted(actions)[1][0])).starts[0].brownout == ""
    assert rig.core.next_deadline() is None or not has(rig.log, BrownoutStepChanged)


def test_running_answers_keep_what_they_were_admitted_with() -> None:
    """An answer that began before the brownout is neither capped on its next shard, nor is one that was capped ever
    given more, and the end of the brownout changes neither."""
    rig = degraded_rig(0)
    rig.add_shard("s1", max_batch=50)
    early = only(rig.submit("early", slots=(1,)), SubmitAttempt)
    for number in range(1):
        attempt = only(rig.submit(f"slow-{number}", slots=(900 + number,)), SubmitAttempt)
        rig.now += 1.3
        rig.start(attempt.shard_id, attempt.choices[0].slot)
    late = only(rig.submit("late", slots=(2,)), SubmitAttempt)
    assert (early.max_tokens, late.max_tokens) == (10, 6)
    moved = {
        action.request.request_id: action.max_tokens
        for shard in ("s0", "s1")
        for action in (rig.handle(ShardDown(shard)) if shard == "s0" else [])
        if isinstance(action, SubmitAttempt)
    }
    assert all(moved[name] == limit for name, limit in (("early", 10), ("late", 6)) if name in moved)
    assert moved


def test_an_answer_that_another_router_has_begun_is_left_alone() -> None:
    """It was admitted there."""
    rig = degraded_rig(3)
    choices = [ChoiceSpec(1, 0, (7, 8), 2)]
    attempt = only(rig.submit("r", choices=choices, tier=TierRank.BATCH, has_fallback_model=True), SubmitAttempt)
    assert attempt.max_tokens == 10
    assert attempt.request.degradation is None


@pytest.mark.parametrize(
    ("request_has", "effect", "message", "field"),
    [
        ({"slots": (1, 2)}, "max_choices", "n may be at most 1", "n"),
        ({"has_fallback_model": True}, "smaller_model", "passed on", ""),
        ({"tier": TierRank.BATCH}, "shed", "'batch' are refused", ""),
    ],
)
def test_refusals_name_the_reason_and_the_time_to_wait(
    request_has: dict[str, Any], effect: str, message: str, field: str
) -> None:
    """A client that gets a 429 sees what to change, and when to come back."""
    rig = degraded_rig(3)
    actions = rig.submit("r", **request_has)
    error = sent(actions).finishes[0].error
    assert error is not None
    assert (error.reason, error.field) == (ErrorReason.ERROR_REASON_BROWNOUT, field)
    assert message in error.message
    assert "step 3" in error.message
    assert error.retry_after_seconds > 0
    assert only(actions, RequestDegraded).effects == (effect,)
    assert not has(actions, SubmitAttempt)


def test_what_would_wait_too_long_is_refused_and_counts() -> None:
    """The last resort keeps the queue short. These refusals are misses of the objective, or the ladder would come down
    while it hides the overload; requests that need not wait are served."""
    rig = CoreRig(
        brownout=BrownoutSettings(
            enabled=True,
            ttft_slo_seconds=1.0,
            fast_window_seconds=1.0,
            slow_window_seconds=10.0,
            min_requests=1,
            min_step_seconds=1.0,
            hold_seconds=5.0,
            steps=[BrownoutStepConfig(max_queue_seconds=3.0)],
        ),
        policy="least_requests",
    )
    rig.add_shard(max_batch=1)
    running = [submitted(rig.submit(f"old{i}", slots=(i,)))[1][0] for i in range(2)]
    for i in range(2, 14):
        rig.submit(f"old{i}", slots=(i,))
    for _ in range(8):
        rig.now += 1.0
        slot = running.pop(0)
        rig.start("s0", slot)
        running.append(submitted(rig.finish("s0", slot))[1][0])
    assert rig.core.num_queued_requests == 4
    error = sent(rig.submit("late", slots=(90,))).finishes[0].error
    assert error is not None
    assert error.reason == ErrorReason.ERROR_REASON_BROWNOUT
    assert "it would wait 6." in error.message
    assert has(rig.log, BrownoutStepChanged)
    assert RequestDegraded("m", ("max_queue_seconds",)) in rig.log


def test_tiers_that_a_step_does_not_name_are_exempt_from_it() -> None:
    """applies_to: batch requests have the cap of the first step only, and any number of choices."""
    rig = degraded_rig(2)
    attempt = only(rig.submit("r", slots=(1, 2), tier=TierRank.BATCH), SubmitAttempt)
    assert attempt.max_tokens == 6
    assert rig.core.prefers_others("m", TierRank.INTERACTIVE)
    assert not rig.core.prefers_others("m", TierRank.BATCH)


def test_shadow_traffic_and_embeddings_are_not_degraded() -> None:
    """A comparison needs the whole answer, and a vector has no length. Neither says anything about the objective."""
    rig = degraded_rig(2)
    shadow = only(rig.submit("shadow", slots=(1,), tier=TierRank.SHADOW), SubmitAttempt)
    assert shadow.max_tokens == 10
    rig.add_shard("e", capabilities=frozenset(("embed", "generate")))
    vector = only(rig.submit("v", slots=(2,), max_tokens=0, pooling=Pooling()), SubmitAttempt)
    assert vector.request.degradation is None


def test_it_ends_by_itself() -> None:
    """Without any request the ticks bring the model back, step by step, and the fleet's state says so."""
    rig = degraded_rig(2)
    assert rig.core.fleet.models[0].brownout_step == 2
    steps = []
    while (at := rig.core.next_deadline()) is not None and rig.now < 60.0:
        rig.now = max(rig.now, at)
        actions = rig.handle(Tick())
        if has(actions, BrownoutStepChanged):
            steps.append(only(actions, BrownoutStepChanged).step)
            assert only(actions, FleetChanged).models[0].brownout_step == steps[-1]
    assert steps == [1, 0]
    assert only(rig.submit("r", slots=(1,)), SubmitAttempt).max_tokens == 10


def test_the_fleets_state_has_the_step_that_the_ends_of_waiting_requests_caused() -> None:
    """Requests that are given up with their last shard end after the loss of the shard is known: clients would learn
    of the step only with the next event."""
    rig = degraded_rig(0)
    rig.handle(ShardDown("s0"))
    rig.add_shard("s0", max_batch=1)
    for number in range(3):
        rig.submit(f"r{number}", slots=(number,))
    rig.now += 0.6
    assert has(rig.handle(ShardDown("s0")), BrownoutStepChanged)
    assert rig.core.fleet.models[0].brownout_step == 1


def test_refusals_for_overload_count_and_those_of_the_ladder_do_not() -> None:
    """A queue that refuses interactive requests misses the objective; the ladder must not feed itself."""
    rig = degraded_rig(0, max_queued_requests=1)
    rig.handle(ShardDown("s0"))
    rig.add_shard("s0", max_batch=1)
    for number in range(3):
        rig.submit(f"r{number}", slots=(number,))
    assert rig.core.fleet.models[0].brownout_step == 0
    rig.submit("refused", slots=(9,))
    assert rig.core.fleet.models[0].brownout_step == 1
    rig = degraded_rig(2)
    for number in range(50):
        rig.now += 0.1
        assert not has(rig.submit(f"n{number}", slots=(1, 2)), BrownoutStepChanged)


def test_clients_that_leave_in_time_say_nothing() -> None:
    """Only one that has waited longer than the objective counts as missed."""
    rig = degraded_rig(0)
    rig.submit("quick", slots=(1,))
    assert not has(rig.handle(RequestCancelled("quick")), BrownoutStepChanged)
    rig.submit("patient", slots=(2,))
    rig.now += 0.6
    assert has(rig.handle(RequestCancelled("patient")), BrownoutStepChanged)


def test_cached_answers_are_whole_and_capped_ones_are_not_kept() -> None:
    """An answer from the result cache costs no shard anything, so it is never degraded. A capped answer is not that to
    the request, so no later request may get it."""
    rig = degraded_rig(1)
    finish = Finish(0, FinishReason.FINISH_REASON_STOP, num_output_tokens=8)
    cached = CachedChoice(list(range(8)), ["x"] * 8, finish)
    request = Request("hit", "c", "m", [1, 2], "text", [ChoiceSpec(5, 0)], max_tokens=10)
    actions = rig.handle(RequestArrived(request, ticket="t", result_cache=RESULT_CACHE_USE_HIT, cached=[cached]))
    assert len(sent(actions).token_ids) == 8
    assert not has(actions, RequestDegraded)
    missed = Request("miss", "c", "m", [1, 2], "text", [ChoiceSpec(6, 0)], max_tokens=10)
    _, (slot,) = submitted(rig.handle(RequestArrived(missed, ticket="t")))
    rig.start("s0", slot)
    assert not only(rig.finish("s0", slot, FINISH_REASON_LENGTH), AnswerCompleted).is_exact


def test_short_timeouts_cause_no_brownout() -> None:
    """A client that gives its requests less time than the objective must not shorten the answers of all others."""
    rig = degraded_rig(0, max_queued_requests=1)
    rig.handle(ShardDown("s0"))
    rig.add_shard("s0", max_batch=1)
    for number in range(3):
        rig.submit(f"r{number}", slots=(number,))
    for number in range(9, 30):
        rig.submit(f"hasty-{number}", slots=(number,), timeout_seconds=0.1)
    assert not has(rig.log, BrownoutStepChanged)


def test_a_shard_is_told_what_to_leave_out() -> None:
    """A cap below min_tokens is no mistake of the client, so the shard must not refuse the request for it."""
    rig = degraded_rig(1)
    stop = StopConditions(min_tokens=8, max_tokens=10)
    attempt = only(rig.submit("r", sampling=SamplingParams(), stop=stop), SubmitAttempt)
    submit = convert.submit_to_proto(attempt, packs_token_ids=True)
    assert submit.no_speculation
    assert (submit.stop.max_tokens, submit.stop.min_tokens) == (6, 6)
    assert stop.min_tokens == 8
