"""Prompts that one shard computes for another: the legs, their hand-offs, and what happens when either part fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_ERROR, FINISH_REASON_LENGTH
from router.core.actions import (
    Action,
    CancelOnShard,
    LegOutcome,
    PlacementDecided,
    PrefillLegCounted,
    RequestEnded,
    SubmitAttempt,
)
from router.core.core_config import NO_OVERLOAD_CONTROL
from router.core.dispatch.prefill_handoffs import HandoffAbilities
from router.core.events import (
    KvSnapshotArrived,
    LoadReported,
    RequestCancelled,
    ShardDown,
    ShardLoad,
    ShardUp,
    Tick,
    TierRank,
)
from router.core.frames import Finish, Start
from router.core.priority_classes import CLASS_OF_TIER
from router.core.rule_settings import DisaggregationSettings
from tests.fakes.core_rig import CoreRig, has, only, sent

SETTINGS = DisaggregationSettings(min_prompt_tokens=20, leg_timeout_seconds=5.0)
PROMPT = list(range(40))


def rig_of(*roles: str, **config: Any) -> CoreRig:
    """Shards p0, p1, ... for prompts, d0, d1, ... for answers, b... for both, and w... without a role."""
    rig = CoreRig(disaggregation=SETTINGS, **config)
    for role in roles:
        named = {"p": "prefill", "d": "decode", "b": "both", "w": ""}
        rig.add_shard(role, role=named[role[0]], engine="sim")
    return rig


def hand_over(rig: CoreRig, leg: SubmitAttempt, handoff: bytes = b"kv", num_cached: int = 8) -> list[Action]:
    """The leg's shard computes the prompt and its first token."""
    slot = leg.choices[0].slot
    return rig.step(
        leg.shard_id,
        (slot, [7], "a"),
        starts=[Start(slot, num_cached)],
        finishes=[Finish(slot, FINISH_REASON_LENGTH, handoff=handoff)],
    )


def fail(rig: CoreRig, leg: SubmitAttempt) -> list[Action]:
    error = KvloomError(ErrorReason.ERROR_REASON_ENGINE_FAILED, "broken")
    finish = Finish(leg.choices[0].slot, FINISH_REASON_ERROR, error=error)
    return rig.step(leg.shard_id, finishes=[finish])


def begin(rig: CoreRig, **changes: Any) -> SubmitAttempt:
    fields: dict[str, Any] = {"prompt_token_ids": PROMPT} | changes
    return only(rig.submit(**fields), SubmitAttempt)


def answer(rig: CoreRig, attempt: SubmitAttempt, token_ids: Sequence[int]) -> list[Action]:
    slot = attempt.choices[0].slot
    rig.step(attempt.shard_id, (slot, token_ids[:1], "a"), starts=[Start(slot, 40)])
    for token_id in token_ids[1:]:
        rig.step(attempt.shard_id, (slot, [token_id], "a"))
    return rig.finish(attempt.shard_id, slot)


def test_a_long_prompt_is_computed_on_one_shard_and_answered_by_another():
    """The client gets one answer, with the cached tokens of the shard that has computed the prompt."""
    rig = rig_of("p0", "d0")
    leg = begin(rig)
    assert (leg.shard_id, leg.attempt_id, leg.prefill_only, leg.prepares) == ("p0", 0, True, "r")
    assert list(leg.request.prompt_token_ids) == PROMPT
    attempt = only(hand_over(rig, leg), SubmitAttempt)
    assert (attempt.shard_id, attempt.attempt_id, attempt.handoff) == ("d0", 1, b"kv")
    ended = only(answer(rig, attempt, [7, 8, 9]), RequestEnded)
    assert (ended.num_output_tokens, ended.num_cached_tokens, ended.num_attempts) == (3, 8, 1)
    assert rig.core.is_idle


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": PROMPT[:19]},
        {"max_tokens": 1},
        {"slots": (1, 2)},
        {"max_cached_tokens": 4},
        {"pooling": object(), "max_tokens": 0},
    ],
    ids=["short", "one token", "two choices", "prompt logprobs", "embedding"],
)
def test_other_requests_are_computed_whole_on_the_shard_of_the_answer(changes: dict[str, Any]):
    """A leg would cost more than it saves, or the hand-off would lack something."""
    rig = CoreRig(disaggregation=SETTINGS)
    for shard_id, role in (("p0", "prefill"), ("d0", "decode")):
        rig.add_shard(shard_id, role=role, capabilities=frozenset({"generate", "embed"}))
    whole = begin(rig, **changes)
    assert (whole.shard_id, whole.attempt_id, whole.prefill_only, whole.handoff) == ("d0", 1, False, b"")


@pytest.mark.parametrize("roles", [("w0",), ("p0",), ("d0",), ("b0",), ("p0", "w0")])
def test_without_shards_of_both_roles_nothing_is_split(roles: Sequence[str]):
    """A shard for prompts gives whole answers where there is no other."""
    rig = rig_of(*roles)
    assert (begin(rig).attempt_id, begin(rig, request_id="r2", slots=(2,)).handoff) == (1, b"")


def test_kv_is_fetched_only_by_an_engine_of_the_same_kind_and_variant():
    """Another one could not read it."""
    rig = CoreRig(disaggregation=SETTINGS)
    rig.add_shard("p0", role="prefill", engine="sim", variant="a")
    rig.add_shard("d0", role="decode", engine="sim", variant="b")
    rig.add_shard("d1", role="decode", engine="torch", variant="a")
    assert not begin(rig).prefill_only


@pytest.mark.parametrize(
    ("prefill", "decode", "is_split"),
    [(True, True, True), (False, False, False), (True, False, False), (False, True, False)],
)
def test_log_probabilities_are_handed_over_only_between_shards_that_can(prefill: bool, decode: bool, is_split: bool):
    """Otherwise the answer's first token would have none."""
    handoffs = HandoffAbilities(wants_logprobs=lambda sampling: sampling == "logprobs")
    rig = CoreRig(disaggregation=SETTINGS, handoffs=handoffs)
    for shard_id, role, can in (("p0", "prefill", prefill), ("d0", "decode", decode)):
        rig.add_shard(shard_id, role=role, capabilities=frozenset({"handoff_logprobs"} if can else ()))
    assert begin(rig, sampling="logprobs").prefill_only == is_split
    assert begin(rig, request_id="r2", slots=(2,), prompt_token_ids=PROMPT[::-1]).prefill_only == (prefill == decode)


def test_a_prompt_that_the_shard_of_the_answer_has_cached_is_not_split():
    """Only what it would have to compute counts."""
    rig = rig_of("p0", "d0")
    whole = begin(rig)
    hashes = rig.core._lifecycle.requests["r"].prompt_hashes(4)
    rig.handle(KvSnapshotArrived("d0", 1, list(hashes)))
    assert whole.prefill_only
    assert not begin(rig, request_id="r2", slots=(2,)).prefill_only


def test_a_leg_goes_where_the_prefix_is_cached_and_the_answer_where_load_is_least():
    """The KV comes to the shard of the answer whatever it has cached."""
    rig = rig_of("p0", "p1", "d0", "d1", policy="ect")
    first = begin(rig)
    attempt = only(hand_over(rig, first), SubmitAttempt)
    second = begin(rig, request_id="r2", slots=(2,), prompt_token_ids=[*PROMPT[:16], *range(100, 140)])
    assert second.shard_id == first.shard_id
    other = only(hand_over(rig, second), SubmitAttempt)
    assert {attempt.shard_id, other.shard_id} == {"d0", "d1"}


def test_a_lost_prefill_shard_is_replaced():
    """By another one, then by none: the request is computed whole."""
    rig = rig_of("p0", "p1", "d0")
    leg = begin(rig)
    again = only(rig.handle(ShardDown(leg.shard_id)), SubmitAttempt)
    assert (again.prefill_only, {leg.shard_id, again.shard_id}) == (True, {"p0", "p1"})
    whole = only(fail(rig, again), SubmitAttempt)
    assert (whole.shard_id, whole.attempt_id, whole.handoff) == ("d0", 1, b"")


def test_a_prefill_shard_that_is_lost_after_its_hand_off_makes_it_worthless():
    """The KV is gone. Asking for it would cost an attempt."""
    rig = rig_of("p0", "d0", "d1")
    rig.core._fleet.shards["d0"].limit = rig.core._fleet.shards["d1"].limit = 0
    rig.core._fleet.shards["d0"].limit = 1
    leg = begin(rig)
    rig.core._fleet.shards["d0"].limit = 0
    assert not has(hand_over(rig, leg), SubmitAttempt)
    rig.handle(ShardDown("p0"))
    rig.core._fleet.shards["d1"].limit = 4
    rig.now += 1
    whole = only(rig.handle(Tick()), SubmitAttempt)
    assert (whole.shard_id, whole.handoff) == ("d1", b"")


def test_a_lost_decode_shard_is_an_ordinary_failover():
    """The answer continues after its tokens, with its prompt computed again; shards for prompts give answers last."""
    rig = rig_of("p0", "d0", "d1")
    attempt = only(hand_over(rig, begin(rig)), SubmitAttempt)
    slot = attempt.choices[0].slot
    rig.step(attempt.shard_id, (slot, [7], "a"), starts=[Start(slot, 40)])
    rig.step(attempt.shard_id, (slot, [8], "b"))
    again = only(rig.handle(ShardDown(attempt.shard_id)), SubmitAttempt)
    assert (again.attempt_id, again.handoff, again.prefill_only) == (2, b"", False)
    assert (again.shard_id != attempt.shard_id, again.shard_id[0]) == (True, "d")
    assert list(again.choices[0].output_token_ids) == [7, 8]
    last = only(rig.handle(ShardDown(again.shard_id)), SubmitAttempt)
    assert last.shard_id == "p0"


def test_a_decode_shard_that_cannot_fetch_fails_its_attempt_only():
    """The next attempt computes the prompt."""
    rig = rig_of("p0", "d0")
    attempt = only(hand_over(rig, begin(rig)), SubmitAttempt)
    again = only(fail(rig, attempt), SubmitAttempt)
    assert (again.attempt_id, again.handoff) == (2, b"")


def test_a_cancelled_request_cancels_its_leg():
    """Nothing of it may stay anywhere."""
    rig = rig_of("p0", "d0")
    leg = begin(rig)
    cancelled = rig.handle(RequestCancelled("r"))
    assert only(cancelled, CancelOnShard) == CancelOnShard("p0", [leg.choices[0].slot])
    assert only(cancelled, RequestEnded).num_output_tokens == 0
    assert not has(rig.step("p0", finishes=[Finish(leg.choices[0].slot, FINISH_REASON_CANCELLED)]), SubmitAttempt)
    assert rig.core.is_idle


def collected(rig: CoreRig, actions: Sequence[Action]) -> str:
    """Assert that the hand-off is collected, and nothing else is sent. Returns by which shard."""
    collection = only(actions, SubmitAttempt)
    slot = collection.choices[0].slot
    assert (collection.handoff, collection.attempt_id, collection.max_tokens) == (b"kv", 0, 1)
    assert list(collection.request.prompt_token_ids) == PROMPT
    rig.core.check_integrity()
    rig.step(collection.shard_id, (slot, [7], "a"), starts=[Start(slot, 40)])
    assert not rig.finish(collection.shard_id, slot, FINISH_REASON_LENGTH)
    return collection.shard_id


@pytest.mark.parametrize("way", ["cancelled", "slow", "moved"])
def test_kv_of_a_leg_that_was_given_up_too_late_is_collected(way: str):
    """The shard would keep it for its timeout, as a cancel does not free it."""
    rig = rig_of("p0", "d0", "d1")
    leg = begin(rig)
    if way == "cancelled":
        rig.handle(RequestCancelled("r"))
    elif way == "slow":
        rig.now += 5.0
        rig.handle(Tick())
    else:
        rig.handle(LoadReported("p0", ShardLoad(draining=True, hand_over=True)))
    busy = None if way == "cancelled" else rig.core._lifecycle.requests["r"].choices[0].shard_id
    shard_id = collected(rig, hand_over(rig, leg))
    assert shard_id in {"d0", "d1"} - {busy}
    if way == "cancelled":
        assert rig.core.is_idle


@pytest.mark.parametrize("way", ["cancelled", "expired"])
def test_kv_that_waits_for_an_answer_that_ends_is_collected(way: str):
    """However full the shards are: a request waits with its hand-off only while they are."""
    rig = rig_of("p0", "d0")
    leg = begin(rig, timeout_seconds=9.0)
    rig.core._fleet.shards["d0"].limit = 0
    assert not has(hand_over(rig, leg), SubmitAttempt)
    rig.now += 9.0
    actions = rig.handle(RequestCancelled("r") if way == "cancelled" else Tick())
    assert only(actions, RequestEnded).num_output_tokens == 0
    assert collected(rig, actions) == "d0"
    assert rig.core.is_idle


def refuse(rig: CoreRig, attempt: SubmitAttempt) -> list[Action]:
    """The shard has no room, and gives the hand-off back."""
    error = KvloomError(ErrorReason.ERROR_REASON_QUEUE_FULL, "full")
    finish = Finish(attempt.choices[0].slot, FINISH_REASON_ERROR, error=error, handoff=attempt.handoff)
    return rig.step(attempt.shard_id, finishes=[finish])


def test_a_hand_off_that_a_full_shard_gives_back_is_used_by_the_next_one():
    """Its KV has not been asked for, and would otherwise stay until its timeout."""
    rig = rig_of("p0", "d0", "d1")
    attempt = only(hand_over(rig, begin(rig)), SubmitAttempt)
    actions = refuse(rig, attempt)
    again = only(actions, SubmitAttempt)
    assert (again.handoff, again.attempt_id, again.shard_id == attempt.shard_id) == (b"kv", 2, False)
    assert not outcomes(actions), "its leg is counted already"
    ended = only(answer(rig, again, [7, 8, 9]), RequestEnded)
    assert (ended.num_output_tokens, ended.num_cached_tokens) == (3, 8)
    assert rig.core.is_idle


def test_a_hand_off_that_comes_back_from_the_last_attempt_is_collected():
    """The request ends, and its KV is no longer needed."""
    rig = rig_of("p0", "d0", "d1", max_attempts=1)
    attempt = only(hand_over(rig, begin(rig)), SubmitAttempt)
    actions = refuse(rig, attempt)
    assert only(actions, RequestEnded).error_reason
    assert collected(rig, actions)
    assert rig.core.is_idle


def test_a_hand_off_that_comes_back_after_its_answer_has_ended_is_collected():
    """The shard has refused the attempt while its client left."""
    rig = rig_of("p0", "d0", "d1")
    attempt = only(hand_over(rig, begin(rig)), SubmitAttempt)
    rig.handle(RequestCancelled("r"))
    assert collected(rig, refuse(rig, attempt))
    assert rig.core.is_idle


@pytest.mark.parametrize("way", ["prefill", "decode"])
def test_kv_is_not_collected_where_that_cannot_be(way: str):
    """It is gone with its shard, or waits for its timeout as no shard could fetch it."""
    rig = rig_of("p0", "d0")
    leg = begin(rig)
    rig.core._fleet.shards["d0"].limit = 0
    hand_over(rig, leg)
    actions = [*rig.handle(ShardDown("p0" if way == "prefill" else "d0")), *rig.handle(RequestCancelled("r"))]
    assert not any(isinstance(action, SubmitAttempt) and action.handoff for action in actions)


def test_a_leg_that_takes_too_long_is_given_up():
    """A shard may hang without being lost."""
    rig = rig_of("p0", "d0")
    leg = begin(rig)
    assert rig.core.next_deadline() == rig.now + 5.0
    rig.now += 5.0
    actions = rig.handle(Tick())
    assert only(actions, CancelOnShard) == CancelOnShard("p0", [leg.choices[0].slot])
    whole = only(actions, SubmitAttempt)
    assert (whole.shard_id, whole.prefill_only) == ("d0", False)
    rig.step("p0", finishes=[Finish(leg.choices[0].slot, FINISH_REASON_CANCELLED)])


def test_a_request_that_arrives_when_a_leg_is_given_up_is_not_refused_for_it():
    """The request of the leg is queued for a moment only: a shard has room for both."""
    rig = rig_of("p0", "d0", max_queued_requests=1)
    begin(rig)
    rig.now += 5.0
    actions = rig.submit(request_id="r2", slots=(2,), prompt_token_ids=[1, 2])
    sent_ids = [action.request.request_id for action in actions if isinstance(action, SubmitAttempt)]
    assert (sent_ids, has(actions, RequestEnded)) == (["r", "r2"], False)


def test_an_answer_of_one_token_is_not_handed_over():
    """Its first token has ended it, so the shard of the answer computes it alone."""
    rig = rig_of("p0", "p1", "d0")
    leg = begin(rig)
    whole = only(hand_over(rig, leg, handoff=b""), SubmitAttempt)
    assert (whole.shard_id, whole.prefill_only) == ("d0", False)


def test_both_placements_are_explained():
    """An operator sees why each part runs where it does."""
    rig = rig_of("p0", "d0", decision_sample_share=1.0)
    actions = rig.submit(prompt_token_ids=PROMPT)
    leg = only(actions, PlacementDecided)
    assert (leg.attempt_id, leg.plan.picked_shard_id) == (0, "p0")
    decided = only(hand_over(rig, only(actions, SubmitAttempt)), PlacementDecided)
    assert (decided.attempt_id, decided.plan.picked_shard_id) == (1, "d0")


def test_the_client_gets_nothing_of_a_leg():
    """Its token comes again with the answer."""
    rig = rig_of("p0", "d0")
    leg = begin(rig)
    actions = hand_over(rig, leg)
    attempt = only(actions, SubmitAttempt)
    slot = attempt.choices[0].slot
    first = sent(rig.step(attempt.shard_id, (slot, [7], "a"), starts=[Start(slot, 40)]))
    assert (first.token_ids, first.starts[0].num_cached_tokens) == ([7], 8)


def outcomes(actions: Sequence[Action]) -> list[LegOutcome | None]:
    return [action.outcome for action in actions if isinstance(action, PrefillLegCounted)]


def test_each_leg_is_counted_with_its_single_outcome():
    """The counters of a router add up: what has begun and has no outcome is under way."""
    rig = rig_of("p0", "p1", "d0")
    begun = rig.submit(prompt_token_ids=PROMPT)
    leg = only(begun, SubmitAttempt)
    failed = fail(rig, leg)
    again = only(failed, SubmitAttempt)
    used = hand_over(rig, again)
    assert [outcomes(begun), outcomes(failed), outcomes(used)] == [[None], [LegOutcome.FAILED, None], [LegOutcome.USED]]
    assert not outcomes(answer(rig, only(used, SubmitAttempt), [7, 8]))


@pytest.mark.parametrize("has_handed_over", [False, True])
def test_a_leg_of_a_request_that_ends_is_counted_as_cancelled(has_handed_over: bool):
    """Its KV is lost, whether it was computed or not."""
    rig = rig_of("p0", "d0")
    rig.core._fleet.shards["d0"].limit = 1
    leg = begin(rig)
    if has_handed_over:
        rig.core._fleet.shards["d0"].limit = 0
        assert not outcomes(hand_over(rig, leg))
    assert outcomes(rig.handle(RequestCancelled("r"))) == [LegOutcome.CANCELLED]


@pytest.mark.parametrize("way", ["lost", "slow", "empty"])
def test_the_loss_of_a_leg_is_counted_by_cause(way: str):
    """An operator sees whether prefill shards are lost, slow, or hand nothing over."""
    rig = rig_of("p0", "d0")
    leg = begin(rig)
    if way == "lost":
        assert outcomes(rig.handle(ShardDown("p0"))) == [LegOutcome.SHARD_LOST]
    elif way == "slow":
        rig.now += 5.0
        assert outcomes(rig.handle(Tick())) == [LegOutcome.TIMED_OUT]
    else:
        assert outcomes(hand_over(rig, leg, handoff=b"")) == [LegOutcome.NOTHING_HANDED_OVER]


def test_a_prompt_on_a_prefill_shard_counts_as_service_of_its_tenant():
    """Another tenant that waits is served first, as if the prompt had been computed where its answer is."""
    rig = rig_of("p0", "d0")
    other = begin(rig, tenant="t2", prompt_token_ids=[1, 2])
    begin(rig, request_id="long", slots=(2,), tenant="t1")
    rig.core._fleet.shards["d0"].limit = 1
    for name, slot in (("t1", 3), ("t2", 4)):
        assert not has(rig.submit(request_id=name, slots=(slot,), tenant=name, prompt_token_ids=[1, 2]), SubmitAttempt)
    served = only(rig.finish("d0", other.choices[0].slot), SubmitAttempt)
    assert served.request.request_id == "t2"


def test_a_leg_has_the_class_of_its_request():
    """Interactive prompts go first in the engine: counted as one of them, a batch leg would keep them off the shard."""
    rig = CoreRig(disaggregation=SETTINGS)
    for shard_id, role in (("p0", "prefill"), ("d0", "decode")):
        rig.add_shard(shard_id, role=role, engine="sim", yield_tokens=16)
    begin(rig, tier=TierRank.BATCH)
    view = rig.core._ledger.view("p0")
    assert view.num_urgent_sequences(CLASS_OF_TIER[TierRank.INTERACTIVE].rank) == 0
    assert view.ranked_sequences == {CLASS_OF_TIER[TierRank.BATCH].rank: 1}
    rig.core.check_integrity()


def test_a_request_whose_last_shard_leaves_during_its_leg_does_not_wait_for_ever():
    """While it had a leg it was not looked at when the fleet changed."""
    rig = rig_of("p0", "d0", overload=msgspec.structs.replace(NO_OVERLOAD_CONTROL, outage_patience_seconds=1.0))
    leg = begin(rig)
    rig.core._fleet.shards["p0"].limit = rig.core._fleet.shards["d0"].limit = 0
    rig.submit(request_id="r2", slots=(2,))
    rig.handle(ShardDown("d0"))
    rig.handle(LoadReported("p0", ShardLoad(draining=True)))
    assert not has(fail(rig, leg), RequestEnded)
    rig.now += 1.0
    ended = [action.request_id for action in rig.handle(Tick()) if isinstance(action, RequestEnded)]
    assert sorted(ended) == ["r", "r2"]


def test_a_request_whose_prompt_is_computed_takes_no_place_in_the_queue():
    """Its KV waits, and the queue's bound is for requests for which nothing has been done."""
    rig = rig_of("p0", "d0", max_queued_requests=1)
    leg = begin(rig)
    rig.core._fleet.shards["d0"].limit = 0
    hand_over(rig, leg)
    second = rig.submit(request_id="r2", slots=(2,), prompt_token_ids=[1, 2])
    third = rig.submit(request_id="r3", slots=(3,), prompt_token_ids=[1, 2])
    assert not has(second, RequestEnded)
    assert only(third, RequestEnded).error_reason == ErrorReason.ERROR_REASON_QUEUE_FULL
    assert rig.core._lifecycle.requests.keys() == {"r", "r2"}


def test_requests_that_wait_for_a_prefill_shard_leave_it_for_one_that_answers():
    """A shard for prompts gives whole answers only while there is no other."""
    rig = CoreRig(policy="ect")
    rig.add_shard("p0", role="prefill", max_model_len=40_000, num_blocks=20_000)
    begin(rig, prompt_token_ids=range(20_000))
    assert not has(rig.submit(request_id="r2", slots=(2,), prompt_token_ids=range(9, 20_000)), SubmitAttempt)
    description = rig.core._fleet.shards["p0"].description
    answers = msgspec.structs.replace(description, shard_id="d0", role="decode")
    sent_now = [action for action in rig.handle(ShardUp(answers)) if isinstance(action, SubmitAttempt)]
    assert sent_now
    assert all(one.shard_id == ("p0" if one.prefill_only else "d0") for one in sent_now)
