"""Tokens from shards to clients, with cancellation, deadlines and failover in between."""

from __future__ import annotations

import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from router.core.actions import CancelOnShard, RequestEnded, SendStep, SubmitAttempt
from router.core.events import (
    ChoiceSpec,
    ClientGone,
    FrameArrived,
    RequestCancelled,
    ShardDown,
    SlotsCancelled,
    StepArrived,
    Tick,
)
from router.core.frames import Finish, Start, Step
from tests.fakes.core_rig import CoreRig, has, only, sent, submitted


def test_step_is_translated_and_batched_per_client() -> None:
    """One engine step is one frame per client, in its own slots, whichever other clients are in the step."""
    rig = CoreRig()
    rig.add_shard()
    slots = [submitted(rig.submit(f"r{i}", slots=(10 + i,), client_id=f"c{i % 2}"))[1][0] for i in range(3)]
    actions = rig.step("s0", *((slot, [slot * 7], f"t{slot}") for slot in slots))
    steps = {action.client_id: action.step for action in actions if isinstance(action, SendStep)}
    assert (steps["c0"].slots, steps["c0"].token_ids) == ([10, 12], [slots[0] * 7, slots[2] * 7])
    assert (steps["c1"].slots, steps["c1"].deltas) == ([11], [f"t{slots[1]}"])
    assert steps["c0"].num_tokens == []


def test_ragged_step_and_logprobs() -> None:
    """Speculative engines emit several tokens per step; logprobs follow their tokens to the right slot."""
    rig = CoreRig()
    rig.add_shard()
    [a], [b] = (submitted(rig.submit(f"r{i}", slots=(i,)))[1] for i in range(2))
    step = sent(rig.step("s0", (a, [1, 2], "xy"), (b, [3], "z"), logprobs=[(a, "p1"), (a, "p2")]))
    assert (step.slots, step.num_tokens, step.token_ids) == ([0, 1], [2, 1], [1, 2, 3])
    assert step.logprobs == [(0, "p1"), (0, "p2")]


def test_start_and_finish_are_completed() -> None:
    """The client is sent which shard answered and how much was cached; metering gets exactly what was delivered."""
    rig = CoreRig()
    rig.add_shard()
    _, [slot] = submitted(rig.submit(tenant="t"))
    rig.now = 1.25
    [start] = sent(rig.start("s0", slot)).starts
    assert (start.slot, start.shard_id, start.num_cached_tokens, start.queue_time_seconds) == (1, "s0", 4, 0.5)
    rig.step("s0", (slot, [8], "b"))
    rig.now = 2.0
    actions = rig.finish("s0", slot)
    [finish] = sent(actions).finishes
    assert (finish.slot, finish.num_prompt_tokens, finish.num_cached_tokens, finish.num_output_tokens) == (1, 5, 4, 2)
    ended = only(actions, RequestEnded)
    assert (ended.tenant, ended.shard_id, ended.num_attempts, ended.num_output_tokens) == ("t", "s0", 1, 2)
    assert (ended.ttft_seconds, ended.e2e_latency_seconds, ended.queue_time_seconds) == (0.25, 1.0, 0.0)
    assert ended.num_cached_tokens == 4
    assert rig.core.is_idle


def test_malformed_step_is_refused_whole() -> None:
    """A frame that does not fit together breaks its stream, not the router's state."""
    rig = CoreRig()
    rig.add_shard()
    _, [slot] = submitted(rig.submit())
    with pytest.raises(KvloomError) as caught:
        rig.handle(StepArrived("s0", Step([slot], [], [1, 2], ["a"])))
    assert caught.value.reason == ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION
    assert sent(rig.start("s0", slot)).token_ids == [7]


def test_malformed_frame_changes_nothing_though_a_request_is_overdue() -> None:
    """Not even the parts before the malformed one take effect. An overdue request is ended by the next event: the
    actions of a refused frame would be lost."""
    rig = CoreRig()
    rig.add_shard()
    _, [slot] = submitted(rig.submit(timeout_seconds=0.5))
    good, bad = Step([slot], [], [7], ["a"]), Step([slot], [], [1, 2], ["a"])
    rig.now += 1.0
    with pytest.raises(KvloomError):
        rig.handle(FrameArrived("s0", [StepArrived("s0", good), StepArrived("s0", bad)]))
    rig.core.check_integrity()
    [finish] = sent(rig.handle(Tick())).finishes
    assert finish.error is not None
    assert finish.error.reason == ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED
    assert finish.num_output_tokens == 0


@pytest.mark.parametrize("field", ["block_size", "max_batch", "max_model_len"])
def test_impossible_shard_is_refused(field: str) -> None:
    """A shard that misdescribes itself must not break every later placement."""
    rig = CoreRig()
    with pytest.raises(KvloomError):
        rig.add_shard(**{field: 0})
    assert rig.core.fleet.models == []


def test_cancel_reaches_shard_and_client_at_once() -> None:
    """The client's slot ends at once, late frames are dropped, and the shard's slot is unused until the shard has ended
    it."""
    rig = CoreRig()
    rig.add_shard()
    _, [a, b] = submitted(rig.submit(slots=(1, 2)))
    actions = rig.handle(SlotsCancelled("c", [1, 99]))
    assert only(actions, CancelOnShard).slots == [a]
    assert [(f.slot, f.reason) for f in sent(actions).finishes] == [(1, FinishReason.FINISH_REASON_CANCELLED)]
    assert not has(actions, RequestEnded)
    assert sent(rig.step("s0", (a, [1], "x"), (b, [2], "y"))).slots == [2]
    assert not has(rig.finish("s0", a, FinishReason.FINISH_REASON_CANCELLED), SendStep)
    assert only(rig.finish("s0", b), RequestEnded).num_output_tokens == 1
    assert rig.core.is_idle


def test_cancel_in_the_queue_costs_nothing() -> None:
    """A request that was never dispatched is dropped without a message to any shard."""
    rig = CoreRig()
    rig.add_shard(max_batch=1)
    for i in range(3):
        rig.submit(f"r{i}", slots=(i,))
    actions = rig.handle(RequestCancelled("r2"))
    assert not has(actions, CancelOnShard)
    assert only(actions, RequestEnded).num_attempts == 0


def test_client_gone_cancels_silently() -> None:
    """A broken stream ends its requests on the shards; nothing is sent to the client."""
    rig = CoreRig()
    rig.add_shard()
    _, slots = submitted(rig.submit(slots=(1, 2)))
    actions = rig.handle(ClientGone("c"))
    assert only(actions, CancelOnShard).slots == slots
    assert not has(actions, SendStep)
    assert only(actions, RequestEnded).reason == FinishReason.FINISH_REASON_CANCELLED


def test_deadline_cancels_on_the_shard() -> None:
    """A request that takes too long stops costing."""
    rig = CoreRig(request_timeout_seconds=5.0)
    rig.add_shard()
    _, [slot] = submitted(rig.submit(timeout_seconds=2.0))
    rig.start("s0", slot)
    rig.now = 2.9
    assert rig.handle(Tick()) == []
    rig.now = 3.0
    actions = rig.handle(Tick())
    assert only(actions, CancelOnShard).slots == [slot]
    [finish] = sent(actions).finishes
    assert finish.error is not None
    assert finish.error.reason == ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED
    assert finish.num_output_tokens == 1
    assert rig.core.next_deadline() is None


def test_slot_is_not_reused_at_once() -> None:
    """A cancel that crosses with the end of its sequence must not hit the next one."""
    rig = CoreRig()
    rig.add_shard()
    used = set()
    for i in range(20):
        _, [slot] = submitted(rig.submit(f"r{i}", slots=(i,)))
        assert slot not in used
        used.add(slot)
        rig.finish("s0", slot)


@pytest.mark.parametrize("how", ["crash", "engine failure"])
def test_failover_continues_behind_what_was_delivered(how: str) -> None:
    """The client sees no break: one start, every token once, and the finish counts all attempts' tokens."""
    rig = CoreRig()
    rig.add_shard("s0")
    rig.add_shard("s1")
    first, [slot] = submitted(rig.submit())
    rig.start(first, slot, delta="ab")
    rig.step(first, (slot, [8], "c"))
    actions = rig.handle(ShardDown(first)) if how == "crash" else rig.fail(first, slot)
    attempt = only(actions, SubmitAttempt)
    assert attempt.shard_id != first
    assert attempt.attempt_id == 2
    assert attempt.choices == [ChoiceSpec(attempt.choices[0].slot, 0, (7, 8), 3)]
    assert not has(actions, SendStep)
    second_slot = attempt.choices[0].slot
    step = sent(rig.step(attempt.shard_id, (second_slot, [9], "d"), starts=[Start(second_slot, 0)]))
    assert (step.slots, step.token_ids, step.starts) == ([1], [9], [])
    actions = rig.finish(attempt.shard_id, second_slot)
    [finish] = sent(actions).finishes
    assert (finish.num_output_tokens, finish.num_cached_tokens) == (3, 4)
    assert only(actions, RequestEnded).num_attempts == 2


def test_only_unfinished_choices_move() -> None:
    """One attempt carries what is left of a request; answers that ended stay ended."""
    rig = CoreRig()
    rig.add_shard("s0")
    rig.add_shard("s1")
    first, slots = submitted(rig.submit(slots=(1, 2, 3)))
    rig.finish(first, slots[1])
    attempt = only(rig.handle(ShardDown(first)), SubmitAttempt)
    assert [choice.index for choice in attempt.choices] == [0, 2]


def test_failing_engine_is_retried_where_it_is_alone() -> None:
    """With one shard, a failed sequence is retried there; attempts are bounded."""
    rig = CoreRig(max_attempts=50)
    rig.add_shard()
    _, [slot] = submitted(rig.submit())
    _, [slot] = submitted(rig.fail("s0", slot))
    [finish] = sent(rig.fail("s0", slot)).finishes
    assert finish.error is not None
    assert finish.error.reason == ErrorReason.ERROR_REASON_REQUEST_QUARANTINED


def test_a_request_that_has_killed_two_shards_is_tried_on_no_third() -> None:
    """A poison request, or an adapter that no engine survives, would end shard after shard."""
    rig = CoreRig(max_attempts=50)
    for name in ("s0", "s1", "s2"):
        rig.add_shard(name)
    first, _ = submitted(rig.submit())
    second, _ = submitted(rig.handle(ShardDown(first)))
    actions = rig.handle(ShardDown(second))
    assert not has(actions, SubmitAttempt)
    [finish] = sent(actions).finishes
    assert finish.error is not None
    assert finish.error.reason == ErrorReason.ERROR_REASON_REQUEST_QUARANTINED


def test_an_answer_that_has_begun_survives_any_number_of_shards() -> None:
    """Its output shows that it can be computed: it was there by chance when they were lost."""
    rig = CoreRig(max_attempts=50)
    for name in ("s0", "s1", "s2", "s3"):
        rig.add_shard(name)
    shard, [slot] = submitted(rig.submit(max_tokens=9))
    rig.start(shard, slot)
    for _ in range(3):
        shard, _ = submitted(rig.handle(ShardDown(shard)))


def test_complete_answer_is_not_resubmitted() -> None:
    """All tokens were delivered and only the finish was lost: the answer is complete."""
    rig = CoreRig()
    rig.add_shard("s0")
    rig.add_shard("s1")
    first, [slot] = submitted(rig.submit(max_tokens=1))
    rig.start(first, slot)
    actions = rig.handle(ShardDown(first))
    assert not has(actions, SubmitAttempt)
    assert sent(actions).finishes[0].reason == FinishReason.FINISH_REASON_LENGTH


def test_failover_waits_ahead_of_the_queue() -> None:
    """A request that has begun is resumed before one that has not."""
    rig = CoreRig()
    rig.add_shard("s0", max_batch=1)
    rig.add_shard("s1", max_batch=1)
    placed = {f"r{i}": submitted(rig.submit(f"r{i}", slots=(i,))) for i in range(4)}
    rig.submit("waits", slots=(9,))
    lost = [name for name, (shard_id, _) in placed.items() if shard_id == "s0"]
    kept = [slots[0] for shard_id, slots in placed.values() if shard_id == "s1"]
    rig.handle(ShardDown("s0"))
    assert only(rig.finish("s1", kept[0]), SubmitAttempt).request.request_id in lost


def test_refusal_that_only_this_request_causes_is_final() -> None:
    """An error that every shard would return is not retried."""
    rig = CoreRig()
    rig.add_shard("s0")
    rig.add_shard("s1")
    first, [slot] = submitted(rig.submit())
    error = KvloomError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "bad token", field="prompt")
    actions = rig.step(first, finishes=[Finish(slot, FinishReason.FINISH_REASON_ERROR, error=error)])
    assert not has(actions, SubmitAttempt)
    assert sent(actions).finishes[0].error is error


def test_frames_of_unknown_shards_are_ignored() -> None:
    """A frame may be in transit while its shard is given up."""
    rig = CoreRig()
    assert rig.step("ghost", (1, [1], "x")) == []
