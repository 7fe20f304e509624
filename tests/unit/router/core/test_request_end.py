"""How a request ended and what happened to it on its way: what records, logs, metrics and explanations say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_CONTENT_FILTER
from kvloom_common.tenancy.limits import Limits
from router.convert import finish_to_proto
from router.core.actions import Action, RequestEnded, SubmitAttempt
from router.core.events import ChoiceSpec, RequestCancelled, ShardDown, Tick
from router.core.request_end import RelocationCounts, RequestEnd
from tests.fakes.core_rig import CoreRig, only, sent, submitted
from tests.fakes.limited_rig import LimitedRig, tenant_table

THINK = 99
"""In these tests each such token is one of reasoning."""


def count(token_ids: Sequence[int]) -> int:
    return sum(token_id == THINK for token_id in token_ids)


def rig(**config: Any) -> CoreRig:
    made = CoreRig(meters_usage=True, **config)
    made.add_shard("s0")
    return made


def end_of(actions: list[Action]) -> RequestEnded:
    return only(actions, RequestEnded)


def test_the_ends_of_requests_that_ran() -> None:
    """A bill must tell what the model, the caller, the policy and a fault have ended."""
    world = rig(max_attempts=1)
    found: list[RequestEnd] = []
    for name, finish in (("a", 1), ("b", 2), ("c", FINISH_REASON_CONTENT_FILTER)):
        shard, [slot] = submitted(world.submit(name))
        world.start(shard, slot)
        found.append(end_of(world.finish(shard, slot, finish)).end)
    shard, [slot] = submitted(world.submit("d"))
    found.append(end_of(world.handle(RequestCancelled("d"))).end)
    shard, [slot] = submitted(world.submit("e"))
    found.append(end_of(world.fail(shard, slot)).end)
    assert found == [
        RequestEnd.FINISHED,
        RequestEnd.FINISHED,
        RequestEnd.HALTED,
        RequestEnd.CANCELLED,
        RequestEnd.FAILED,
    ]


def test_what_was_never_admitted_is_rejected_and_what_left_the_queue_is_evicted() -> None:
    """Both end with the same error: a caller who was turned away has used nothing, one who waited may complain."""
    world = CoreRig(max_queued_requests=2, max_queue_seconds=2.0)
    world.add_shard(max_batch=1)
    for i in range(4):
        world.submit(f"busy{i}", slots=(i,), tenant="busy")
    rejected = end_of(world.submit("busy4", slots=(4,), tenant="busy"))
    assert (rejected.request_id, rejected.end) == ("busy4", RequestEnd.REJECTED)
    evicted = end_of(world.submit("calm", slots=(9,), tenant="calm"))
    assert (evicted.request_id, evicted.end, evicted.num_attempts) == ("busy3", RequestEnd.EVICTED, 0)
    world.now += 2.0
    timed_out = [action for action in world.handle(Tick()) if isinstance(action, RequestEnded)]
    assert {ended.end for ended in timed_out} == {RequestEnd.EVICTED}


def test_clients_are_told_whether_their_request_was_rejected_evicted_or_failed() -> None:
    """One who was turned away may try elsewhere at once; a gateway in front counts the three apart."""
    world = CoreRig(max_queued_requests=2, max_queue_seconds=2.0, max_attempts=1)
    world.add_shard(max_batch=1)
    shard, [slot] = submitted(world.submit("a", slots=(0,)))
    for i in range(1, 4):
        world.submit(f"b{i}", slots=(i,))
    told = [sent(world.submit("c", slots=(4,)))]
    world.now += 2.0
    told += [sent(world.handle(Tick())), sent(world.fail(shard, slot))]
    errors = [finish.error for step in told for finish in step.finishes]
    assert [error and (error.end, error.reason_name) for error in errors] == [
        ("rejected", "QUEUE_FULL"),
        ("evicted", "QUEUE_TIMEOUT"),
        ("evicted", "QUEUE_TIMEOUT"),
        ("failed", "ENGINE_FAILED"),
    ]


def test_an_error_that_requests_share_says_of_each_how_it_ended() -> None:
    """A fault ends requests that run and requests that wait with one error."""
    error = KvloomError(ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE, "Gone.")
    ran, waited = error.ended("failed"), error.ended("evicted")
    assert (ran.end, waited.end, waited.message) == ("failed", "evicted", "Gone.")


def test_a_failover_is_counted() -> None:
    """A record that says `finished` must still show that the answer survived a fault."""
    world = rig()
    world.add_shard("s1")
    shard, [slot] = submitted(world.submit())
    world.start(shard, slot)
    other, [slot] = submitted(world.handle(ShardDown(shard)))
    ended = end_of(world.finish(other, slot))
    assert (ended.end, ended.moves) == (RequestEnd.FINISHED, RelocationCounts(num_failovers=1))


def test_a_finish_says_what_had_happened_to_its_request() -> None:
    """A client that saw a pause learns the reason with the end of its answer."""
    world = rig()
    world.add_shard("s1")
    shard, [slot] = submitted(world.submit("a", slots=(0,)))
    other, [slot] = submitted(world.handle(ShardDown(shard)))
    (finish,) = sent(world.finish(other, slot)).finishes
    assert finish_to_proto(finish).moves.num_failovers == 1
    assert finish.moves.words == ["failed_over"]
    _, [slot] = submitted(world.submit("b", slots=(1,)))
    (calm,) = sent(world.finish(other, slot)).finishes
    assert not finish_to_proto(calm).HasField("moves")


def test_reasoning_counts_once_over_failovers() -> None:
    """It is a function of the answer's tokens, wherever they came from."""
    world = rig()
    world.add_shard("s1")
    shard, [slot] = submitted(world.submit(count_reasoning=count))
    world.start(shard, slot, token_id=THINK)
    other, [slot] = submitted(world.handle(ShardDown(shard)))
    world.step(other, (slot, [THINK], "b"))
    world.step(other, (slot, [5], "c"))
    actions = world.finish(other, slot)
    assert sent(actions).finishes[0].num_reasoning_tokens == 2
    usage = end_of(actions).usage
    assert usage is not None
    assert usage.num_reasoning_tokens == 2


@pytest.mark.parametrize(
    ("fields", "recorded"),
    [
        ({}, 3),  # the whole answer
        ({"num_ended_tokens": 9, "num_ended_reasoning_tokens": 4}, 7),  # with choices that ended elsewhere
        ({"num_foreign_tokens": 2}, 1),  # another model's request has these
        ({"num_claimed_tokens": 2}, 1),  # its client says that it has these: they are prompt
    ],
)
def test_reasoning_of_a_continued_answer_is_that_of_its_record(fields: dict[str, Any], recorded: int) -> None:
    """A record counts for what its output tokens count for; the client is told of the whole choice."""
    world = rig()
    choices = [ChoiceSpec(1, 0, [THINK, THINK], 2)]
    shard, [slot] = submitted(world.submit(choices=choices, count_reasoning=count, **fields))
    world.start(shard, slot, token_id=THINK)
    actions = world.finish(shard, slot)
    assert sent(actions).finishes[0].num_reasoning_tokens == 3
    usage = end_of(actions).usage
    assert usage is not None
    assert usage.num_reasoning_tokens == recorded


def test_reasoning_is_charged_with_its_weight() -> None:
    """A limit with reasoning_token_percent = 50 used to settle reasoning at 100."""
    world = LimitedRig(tenant_table(key=Limits(tokens_per_day=1000, reasoning_token_percent=50)), meters_usage=True)
    actions = world.submit(count_reasoning=lambda token_ids: len(token_ids) - 2, max_tokens=10)
    ended = end_of(world.answer(actions, 10))
    assert ended.usage is not None
    [charge] = ended.usage.charges
    assert charge.total == 5 + 2 + 8 // 2  # prompt, text, reasoning
    assert only(actions, SubmitAttempt).max_tokens == 10
