"""Overload: which requests are refused and when, which are served first, and how a backlog is released."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.actions import Action, RequestEnded, SubmitAttempt
from router.core.core_config import NO_OVERLOAD_CONTROL
from router.core.dispatch.overload import DrainRate, retry_after_seconds
from router.core.events import (
    ClientGone,
    LoadReported,
    Request,
    RequestCancelled,
    ShardDescription,
    ShardDown,
    ShardLoad,
    ShardUp,
    Tick,
    TierRank,
)
from router.core.rule_settings import NO_RAMP
from tests.fakes.core_rig import CoreRig, has, only, sent, submitted

SHEDS = msgspec.structs.replace(NO_OVERLOAD_CONTROL, sheds_load_early=True)


def saturated(seconds_per_request: float, **config: Any) -> CoreRig:
    """One shard that serves one request at a time; two run or wait there, the others wait in the router."""
    rig = CoreRig(overload=SHEDS, policy="least_requests", **config)
    rig.add_shard(max_batch=1)
    running = [submitted(rig.submit(f"old{i}", slots=(i,)))[1][0] for i in range(2)]
    for i in range(2, 14):
        rig.submit(f"old{i}", slots=(i,))
    for _ in range(8):
        rig.now += seconds_per_request
        slot = running.pop(0)
        rig.start("s0", slot)
        running.append(submitted(rig.finish("s0", slot))[1][0])
    return rig


def error_of(actions: list[Action]) -> KvloomError:
    error = sent(actions).finishes[0].error
    assert error is not None
    return error


def test_a_request_that_would_wait_too_long_is_refused_on_arrival() -> None:
    """Four requests wait and one is served per second: the fifth would wait for more than three seconds, so it is
    refused at once."""
    rig = saturated(1.0, max_queue_seconds=100.0)
    assert rig.core.num_queued_requests == 4
    assert not has(rig.submit("patient", slots=(90,), timeout_seconds=50.0), RequestEnded)
    actions = rig.submit("urgent", slots=(91,), timeout_seconds=3.0)
    assert error_of(actions).reason == ErrorReason.ERROR_REASON_QUEUE_FULL
    assert only(actions, RequestEnded).num_attempts == 0
    assert rig.core.num_queued_requests == 5


def test_nothing_is_refused_for_its_wait_while_a_shard_is_idle() -> None:
    """Those that wait then wait for one shard: "would wait about 8000.0 seconds" was said beside 99 idle ones."""
    rig = saturated(1.0, max_queue_seconds=100.0)
    rig.handle(ShardUp(ShardDescription("s1", "1", "m", 4, 100, 4, 3, frozenset({"seeded_resume"}))))
    assert rig.core.num_queued_requests == 4  # their prompts are longer than its window
    actions = rig.submit("urgent", slots=(91,), timeout_seconds=3.0, prompt_token_ids=[1], max_tokens=1)
    assert only(actions, SubmitAttempt).shard_id == "s1"


def test_the_bound_on_waiting_holds_by_prediction_too() -> None:
    """max_queue_seconds is applied to the predicted wait, too."""
    rig = saturated(1.0, max_queue_seconds=10.5)
    for i in range(4):
        assert not has(rig.submit(f"fits{i}", slots=(90 + i,)), RequestEnded)
    error = error_of(rig.submit("over", slots=(99,)))
    assert error.reason == ErrorReason.ERROR_REASON_QUEUE_FULL
    assert " 10." in error.message, "nine wait or will have to, and two are in the engine"
    assert 4.5 <= error.retry_after_seconds <= 13.5


def test_without_early_shedding_only_the_bound_counts() -> None:
    """Early shedding can be turned off."""
    rig = CoreRig(overload=NO_OVERLOAD_CONTROL, policy="least_requests", max_queued_requests=3)
    rig.add_shard(max_batch=1)
    for i in range(5):
        assert not has(rig.submit(f"r{i}", slots=(i,), timeout_seconds=0.001), RequestEnded)
    assert error_of(rig.submit("r5", slots=(5,))).reason == ErrorReason.ERROR_REASON_QUEUE_FULL


def test_an_idle_fleet_refuses_no_request() -> None:
    """An old measurement must not cause a refusal: the prediction is about requests that wait now."""
    rig = saturated(5.0)
    rig.handle(ClientGone("c"))
    for slot in list(rig.core._fleet.shards["s0"].attempts):
        rig.finish("s0", slot)
    assert has(rig.submit("next", slots=(50,), timeout_seconds=0.5), SubmitAttempt)


def test_a_stuck_queue_has_a_rate_near_zero() -> None:
    """A shard that hangs shows as a rate near zero."""
    rig = CoreRig(overload=SHEDS, policy="least_requests")
    rig.add_shard(max_batch=1)
    for i in range(4):
        rig.submit(f"r{i}", slots=(i,))
    rig.now += 20.0
    rig.handle(Tick())
    assert error_of(rig.submit("late", slots=(9,))).reason == ErrorReason.ERROR_REASON_QUEUE_FULL


def test_a_request_that_cannot_be_answered_in_time_is_not_sent() -> None:
    """Work for a client that will have given up is taken from other clients: a request loses its place in the queue
    when its remaining time is shorter than an answer takes."""
    rig = saturated(1.0, max_queue_seconds=100.0)
    for _ in range(20):  # answers that take five seconds from the first to the sixth token
        rig.handle(ClientGone("c"))
        for slot in list(rig.core._fleet.shards["s0"].attempts):
            rig.finish("s0", slot)
        _, [slot] = submitted(rig.submit("measured", slots=(70,)))
        rig.start("s0", slot)
        rig.now += 5.0
        rig.step("s0", *[(slot, [5, 6, 7, 8, 9], "x")])
        rig.finish("s0", slot)
    for i in range(3):
        rig.submit(f"r{i}", slots=(i,), timeout_seconds=30.0)
    deadline = rig.core._lifecycle.requests["r2"].queue_deadline - rig.now
    assert 24.0 < deadline < 26.0
    rig.now += 26.0
    ends = [a for a in rig.handle(Tick()) if isinstance(a, RequestEnded)]
    assert [(end.request_id, end.error_reason) for end in ends] == [("r2", ErrorReason.ERROR_REASON_QUEUE_TIMEOUT)]


def test_cancelled_and_abandoned_requests_cost_no_shard_time() -> None:
    """Neither a cancel nor a client that disconnects costs a shard anything."""
    rig = CoreRig(policy="least_requests")
    rig.add_shard(max_batch=1)
    for i in range(2):
        rig.submit(f"running{i}", slots=(i,))
    rig.submit("cancelled", slots=(5,))
    rig.submit("abandoned", slots=(6,), client_id="other")
    rig.submit("parked", slots=(7,), client_id="other", tier=TierRank.BATCH)
    before = len([a for a in rig.log if isinstance(a, SubmitAttempt)])
    rig.handle(RequestCancelled("cancelled"))
    rig.handle(ClientGone("other"))
    for slot in list(rig.core._fleet.shards["s0"].attempts):
        rig.finish("s0", slot)
    assert len([a for a in rig.log if isinstance(a, SubmitAttempt)]) == before == 2
    assert rig.core.is_idle


# -- tiers ------------------------------------------------------------------------------------------------------------


def names(actions: list[Action]) -> list[str]:
    return [a.request.request_id for a in actions if isinstance(a, SubmitAttempt)]


def test_the_backlog_drains_by_tier() -> None:
    """A batch request is sent only when no interactive one waits, however long it has been queued."""
    for policy in ("least_requests", "ect"):
        rig = CoreRig(policy=policy, prefill_chunks=None)
        rig.add_shard(max_batch=1, max_model_len=10**6, num_blocks=10**4)
        big = list(range(40_000))  # keeps the shard busy under a policy that holds requests back
        running = [submitted(rig.submit("first", slots=(0,), prompt_token_ids=big))[1][0]]
        second = rig.submit("second", slots=(1,), prompt_token_ids=[*big, 1])
        for i in range(3):
            rig.submit(f"batch{i}", slots=(10 + i,), tier=TierRank.BATCH)
        for i in range(3):
            rig.submit(f"urgent{i}", slots=(20 + i,))
        order = names(second)
        running += [a.choices[0].slot for a in second if isinstance(a, SubmitAttempt)]
        while running:
            rig.now += 8.0  # no request may wait for more than a minute
            slot = running.pop(0)
            for actions in (rig.start("s0", slot), rig.finish("s0", slot)):
                order += names(actions)
                running += [a.choices[0].slot for a in actions if isinstance(a, SubmitAttempt)]
        assert sorted(order[:-3]) == ["second", "urgent0", "urgent1", "urgent2"], policy
        assert order[-3:] == ["batch0", "batch1", "batch2"], policy


def test_a_full_queue_sheds_the_lower_tier_first() -> None:
    """An interactive request takes the place of the youngest batch request; never the other way round."""
    rig = CoreRig(max_queued_requests=2, policy="least_requests")
    rig.add_shard(max_batch=1)
    for i in range(2):
        rig.submit(f"running{i}", slots=(i,))
    for i in range(2):
        rig.submit(f"batch{i}", slots=(10 + i,), tier=TierRank.BATCH, tenant="a")
    assert [f.slot for f in sent(rig.submit("urgent0", slots=(20,), tenant="a")).finishes] == [11]
    assert [f.slot for f in sent(rig.submit("urgent1", slots=(21,), tenant="a")).finishes] == [10]
    refused = sent(rig.submit("batch2", slots=(12,), tier=TierRank.BATCH, tenant="b")).finishes
    assert [f.slot for f in refused] == [12]
    assert rig.core.num_queued_requests == 2


def test_requests_that_wait_for_a_large_shard_do_not_block_an_idle_small_one() -> None:
    """A full queue neither refuses a batch request nor evicts another for it when it can be sent at once because no
    waiting request fits the free shard."""
    for max_queued_requests, newcomer in ((1, "a"), (2, "b")):
        rig = CoreRig(max_queued_requests=max_queued_requests, policy="least_requests")
        rig.add_shard("large", max_batch=1, max_model_len=100)
        rig.add_shard("small", max_batch=1, max_model_len=50)
        long = {"prompt_token_ids": [1] * 60, "tier": TierRank.BATCH, "tenant": "a"}
        for i in range(2):
            rig.submit(f"running{i}", slots=(i,), **long)
        for i in range(max_queued_requests):
            rig.submit(f"waiting{i}", slots=(10 + i,), **long)
        assert rig.core.num_queued_requests == max_queued_requests
        shard_id, _ = submitted(rig.submit("short", slots=(20,), tier=TierRank.BATCH, tenant=newcomer))
        assert shard_id == "small"
        assert rig.core.num_queued_requests == max_queued_requests


def test_the_predicted_wait_of_the_lower_tier_counts_the_higher() -> None:
    """The wait of a batch request is predicted from the capacity that interactive requests leave."""
    rig = saturated(1.0, max_queue_seconds=40.0)
    for i in range(4):
        rig.submit(f"more{i}", slots=(60 + i,))
    guard = rig.core._overload
    urgent, batch = (
        guard.wait_seconds(Request("later", "c", "m", [1], "", (), tenant="t", tier=tier), rig.now)
        for tier in (TierRank.INTERACTIVE, TierRank.BATCH)
    )
    assert urgent is not None
    assert batch is not None
    assert batch > 2 * urgent
    assert error_of(rig.submit("batch", slots=(80,), tier=TierRank.BATCH)).reason == ErrorReason.ERROR_REASON_QUEUE_FULL


def test_a_flood_of_one_tenant_does_not_refuse_another() -> None:
    """Tenants take turns, so what one has waiting says little about how long another one waits."""
    rig = saturated(4.0, max_queue_seconds=40.0)
    for i in range(5):
        rig.submit(f"more{i}", slots=(60 + i,))
    assert error_of(rig.submit("late", slots=(70,))).reason == ErrorReason.ERROR_REASON_QUEUE_FULL
    assert not rig.submit("calm", slots=(71,), tenant="calm"), "it waits"


# -- outages ----------------------------------------------------------------------------------------------------------


def outage(ramp_start_requests: int = 4) -> CoreRig:
    overload = msgspec.structs.replace(
        NO_OVERLOAD_CONTROL, outage_patience_seconds=3.0, ramp_start_requests=ramp_start_requests
    )
    rig = CoreRig(policy="least_requests", overload=overload)
    rig.add_shard(max_batch=16)
    for i in range(40):
        rig.submit(f"r{i}", slots=(i,))
    return rig


def test_admitted_requests_wait_out_a_short_outage() -> None:
    """A shard restart delays admitted requests instead of failing them; new requests fail at once."""
    rig = outage()
    assert not has(rig.handle(ShardDown("s0")), RequestEnded)
    assert rig.core.num_queued_requests == 40
    assert error_of(rig.submit("new", slots=(99,))).reason == ErrorReason.ERROR_REASON_NO_SHARD_READY
    rig.now += 2.0
    rig.handle(Tick())
    rig.add_shard("s1", max_batch=16)
    rig.now += 2.0
    assert not has(rig.handle(Tick()), RequestEnded)


def scaled_to_zero(**config: Any) -> CoreRig:
    """A model whose last shard has ended, and for which requests wait for 60 seconds."""
    overload = msgspec.structs.replace(SHEDS, start_patience_seconds=60.0, ramp_start_requests=4)
    rig = CoreRig(policy="least_requests", overload=overload, max_queue_seconds=10.0, **config)
    rig.add_shard()
    rig.handle(ShardDown("s0"))
    return rig


def test_requests_wait_for_the_first_shard_to_start() -> None:
    """A fleet is scaled to zero: the first request starts a shard, and so must not be lost. What waits says nothing of
    how fast shards will be, so that nothing is refused for it, neither meanwhile nor when one has come."""
    rig = scaled_to_zero()
    for i in range(20):
        rig.now += 1.0
        assert not rig.submit(f"r{i}", slots=(i,))
    assert rig.core.queued_by_model() == {"m": (20, 100)}
    rig.now += 30.0
    rig.handle(Tick())
    mark = len(rig.log)
    rig.add_shard("s1", max_batch=16)
    assert sum(isinstance(action, SubmitAttempt) for action in rig.log[mark:]) == 4
    assert not has(rig.submit("later", slots=(99,)), RequestEnded)


def test_requests_wait_for_a_shard_no_longer_than_they_may() -> None:
    """Whoever cannot wait for so long, or for whom none comes, is told when to try again; the queue is bounded."""
    rig = scaled_to_zero(max_queued_requests=3)
    for i in range(2):
        assert not rig.submit(f"r{i}", slots=(i,))
    rig.submit("hasty", slots=(10,), timeout_seconds=5.0)
    error = error_of(rig.submit("one too many", slots=(11,)))
    assert (error.reason, error.retry_after_seconds is None) == (ErrorReason.ERROR_REASON_QUEUE_FULL, False)
    rig.now += 5.0
    assert only(rig.handle(Tick()), RequestEnded).error_reason == ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED
    rig.now += 54.0
    assert not has(rig.handle(Tick()), RequestEnded)
    rig.now += 1.0
    assert rig.core.next_deadline() == rig.now
    finishes = sent(rig.handle(Tick())).finishes
    assert [finish.error.reason for finish in finishes if finish.error] == [ErrorReason.ERROR_REASON_NO_SHARD_READY] * 2
    assert all(finish.error.retry_after_seconds for finish in finishes if finish.error)
    assert rig.core.is_idle


def test_what_no_shard_could_serve_waits_for_none() -> None:
    """A malformed request would be held for nothing; a model that is expected is known before its first shard."""
    rig = scaled_to_zero(expected_models=frozenset({"night"}))
    empty = error_of(rig.submit("empty", slots=(1,), prompt_token_ids=()))
    assert empty.reason == ErrorReason.ERROR_REASON_INVALID_ARGUMENT
    assert error_of(rig.submit("unknown", slots=(2,), model="x")).reason == ErrorReason.ERROR_REASON_MODEL_NOT_FOUND
    assert not rig.submit("expected", slots=(3,), model="night")


def test_a_long_outage_is_an_error() -> None:
    """When patience ends, every waiting request fails with the reason."""
    rig = outage()
    rig.handle(ShardDown("s0"))
    deadline = rig.core.next_deadline()
    assert deadline is not None
    assert deadline == rig.now + 3.0
    rig.now = deadline
    ends = [a for a in rig.handle(Tick()) if isinstance(a, RequestEnded)]
    reasons = [end.error_reason for end in ends]
    assert reasons.count(ErrorReason.ERROR_REASON_SHARD_LOST) == 32
    assert reasons.count(ErrorReason.ERROR_REASON_NO_SHARD_READY) == 8
    assert rig.core.is_idle


def test_a_request_that_loses_its_last_shard_after_a_part_was_given_up_is_patient_again() -> None:
    """One choice found no shard and was given up while another one ran. When that one lost its shard too, the request
    waited for its own timeout, since the end of its patience had passed already."""
    rig = CoreRig(overload=msgspec.structs.replace(NO_OVERLOAD_CONTROL, outage_patience_seconds=3.0))
    rig.add_shard()
    rig.submit(slots=(1, 2))
    rig.handle(LoadReported("s0", ShardLoad(draining=True)))
    rig.fail("s0", 1)
    rig.now += 3.0
    assert not has(rig.handle(Tick()), RequestEnded)
    rig.now += 1.0
    assert not has(rig.handle(ShardDown("s0")), RequestEnded)
    rig.now += 3.0
    assert has(rig.handle(Tick()), RequestEnded)


def test_a_shard_that_returns_with_the_overdue_event_is_used() -> None:
    """A router that was suspended finds both patience and the outage over: the event that brings a shard must not fail
    requests for the lack of one."""
    rig = outage(ramp_start_requests=NO_RAMP)
    rig.handle(ShardDown("s0"))
    rig.now += 4.0
    mark = len(rig.log)
    rig.add_shard("s1", max_batch=16)
    assert not has(rig.log[mark:], RequestEnded)
    assert has(rig.log[mark:], SubmitAttempt)
    assert not has(rig.handle(Tick()), RequestEnded)


def test_a_request_given_up_late_does_not_block_a_free_shard() -> None:
    """A router that was suspended finds an overdue request without a shard when a batch request arrives: that one must
    not wait behind it until the next event, which may be its own deadline."""
    rig = CoreRig(
        policy="least_requests", overload=msgspec.structs.replace(NO_OVERLOAD_CONTROL, outage_patience_seconds=3.0)
    )
    rig.add_shard("wide", max_model_len=200)
    rig.submit("long", slots=(1,), max_tokens=150)
    rig.add_shard("narrow", max_model_len=100)
    rig.handle(ShardDown("wide"))
    rig.now += 4.0
    actions = rig.submit("batch", slots=(2,), tier=TierRank.BATCH)
    assert only(actions, RequestEnded).request_id == "long"
    assert submitted(actions)[0] == "narrow"


def test_a_returning_shard_ramps_up() -> None:
    """It is sent little at first and twice as much with every round of first tokens, until it has as much as others."""
    rig = outage()
    rig.handle(ShardDown("s0"))
    mark = len(rig.log)
    rig.add_shard("s0", max_batch=16)
    waiting = [a.choices[0].slot for a in rig.log[mark:] if isinstance(a, SubmitAttempt)]
    assert len(waiting) == 4
    rounds = []
    while waiting:
        rounds.append(len(waiting))
        started, waiting = waiting, []
        for slot in started:
            waiting += [a.choices[0].slot for a in rig.start("s0", slot) if isinstance(a, SubmitAttempt)]
    assert rounds[:3] == [4, 8, 16]
    assert sum(rounds) == 32  # two batches


def test_a_shard_without_a_backlog_needs_no_ramp() -> None:
    """At the start, and when a fleet grows without a backlog, there is no herd."""
    rig = CoreRig(policy="least_requests", overload=msgspec.structs.replace(NO_OVERLOAD_CONTROL, ramp_start_requests=1))
    rig.add_shard(max_batch=4)
    assert sum(has(rig.submit(f"r{i}", slots=(i,)), SubmitAttempt) for i in range(10)) == 8


# -- parts ------------------------------------------------------------------------------------------------------------


def test_advice_to_retry_spreads_a_herd() -> None:
    """A thousand requests that are refused at one moment must not return at one moment."""
    delays = [retry_after_seconds(f"request-{i}", 20.0) for i in range(1000)]
    assert min(delays) >= 10.0
    assert max(delays) <= 30.0
    for begin in range(10, 30, 2):
        assert 60 < sum(begin <= delay < begin + 2 for delay in delays) < 140
    assert retry_after_seconds("x", 20.0) == retry_after_seconds("x", 20.0)
    assert max(retry_after_seconds(f"r{i}", 1e9) for i in range(100)) <= 60.0


def test_rate_is_that_of_a_queue_not_of_demand() -> None:
    """Requests that were sent at once give no evidence of how much the fleet could do."""
    rate = DrainRate()
    for i in range(100):
        rate.note(float(i), 1, has_waiting=False)
    assert rate.per_second() is None
    rate.note(100.0, 0, has_waiting=True)
    for i in range(40):
        rate.note(100.0 + (i + 1) / 4, 1, has_waiting=True)
    measured = rate.per_second()
    assert measured is not None
    assert 3.8 < measured < 4.2


def test_a_start_is_estimated_as_a_refusal_is() -> None:
    """Edges choose among cells by it. Of twelve requests four wait for a shard that serves one a second; beside an
    idle shard nothing waits, and a model without shards has no start."""
    rig = saturated(1.0, max_queue_seconds=100.0)
    start = rig.core.starts(rig.now)["m"]
    assert start.seconds_each == pytest.approx(1.0, rel=0.2)
    assert start.wait_seconds == pytest.approx(5.0, rel=0.2)
    rig.handle(ShardUp(ShardDescription("s1", "1", "m", 4, 100, 4, 3, frozenset({"seeded_resume"}))))
    assert rig.core.starts(rig.now)["m"].wait_seconds == 0.0
    for shard_id in ("s0", "s1"):
        rig.handle(ShardDown(shard_id))
    assert rig.core.starts(rig.now) == {}
