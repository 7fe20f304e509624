"""Shards with notice that they end: what runs there ends in time or moves, and nothing ends because of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from router.core.actions import (
    Action,
    CancelOnShard,
    MoveReason,
    RequestEnded,
    RequestsMoved,
    SubmitAttempt,
)
from router.core.core_config import NO_OVERLOAD_CONTROL
from router.core.dispatch.fair_shares import MAX_MOVES
from router.core.events import LoadReported, ShardDown, ShardLoad, Tick
from router.core.fleet.departure import Departure, RunningWork, ends_in_time, in_order_of_leaving
from router.core.frames import Finish
from tests.fakes.core_rig import CoreRig, has, only

STEP_SECONDS = 0.05


class DepartureRig(CoreRig):
    """Shards s0, s1, ... with a window of 1000 tokens. What is submitted before the second one is added is on s0."""

    def __init__(self, **config: Any) -> None:
        super().__init__(policy="least_requests", **config)
        self.add_shard("s0")

    def add_shard(self, shard_id: str = "s0", **changes: Any) -> None:
        super().add_shard(shard_id, **{"max_model_len": 1000, "num_blocks": 1000, "max_batch": 16, **changes})

    def begin(self, request_id: str, slot: int, max_tokens: int, num_prompt_tokens: int = 5) -> None:
        prompt = [slot] * num_prompt_tokens
        sent = only(
            self.submit(request_id, slots=(slot,), max_tokens=max_tokens, prompt_token_ids=prompt), SubmitAttempt
        )
        self.start(sent.shard_id, sent.choices[0].slot)

    def notice(self, seconds: float | None, shard_id: str = "s0") -> list[Action]:
        load = ShardLoad(draining=seconds is not None, decode_step_seconds=STEP_SECONDS, empty_within_seconds=seconds)
        return self.handle(LoadReported(shard_id, load))

    def wait(self, seconds: float) -> list[tuple[float, Action]]:
        """Time passes from one deadline of the core to the next; returns the actions with their times."""
        actions: list[tuple[float, Action]] = []
        end = self.now + seconds
        while (at := self.core.next_deadline()) is not None and at <= end:
            self.now = max(self.now, at)
            actions += [(self.now, action) for action in self.handle(Tick())]
        self.now = end
        return actions


def moved_at(actions: Sequence[tuple[float, Action]]) -> dict[str, float]:
    return {action.request.request_id: at for at, action in actions if isinstance(action, SubmitAttempt)}


def test_what_ends_in_time_stays_and_the_rest_moves_longest_first_and_not_at_once() -> None:
    """A target gets the prefills one after another, and the last has come with time to spare."""
    rig = DepartureRig()
    rig.begin("short", 1, max_tokens=20)
    for slot, (name, max_tokens) in enumerate((("b", 300), ("a", 500), ("c", 200)), start=2):
        rig.begin(name, slot, max_tokens)
    rig.add_shard("s1")
    noticed_at = rig.now
    actions = [(rig.now, action) for action in rig.notice(5.0)] + rig.wait(2.0)
    rig.finish("s0", 1, FinishReason.FINISH_REASON_LENGTH)
    moved = moved_at(actions + rig.wait(3.0))
    assert list(moved) == ["a", "b", "c"]
    assert moved["a"] == noticed_at
    gaps = [moved["b"] - moved["a"], moved["c"] - moved["b"]]
    assert min(gaps) > 0.5
    assert moved["c"] < noticed_at + 3.5
    assert {action.reason for _, action in actions if isinstance(action, RequestsMoved)} == {MoveReason.NOTICE}


def test_it_continues_after_exactly_the_tokens_it_has() -> None:
    """The client of a moved answer notices a pause, and nothing else."""
    rig = DepartureRig()
    rig.begin("r", 1, max_tokens=500)
    rig.step("s0", (1, [8], "b"))
    rig.add_shard("s1")
    actions = rig.notice(5.0)
    assert only(actions, CancelOnShard) == CancelOnShard("s0", [1])
    move = only(actions, SubmitAttempt)
    assert (move.shard_id, move.choices[0].output_token_ids) == ("s1", (7, 8))
    rig.step("s1", (move.choices[0].slot, [9], "c"))
    end = only(rig.finish("s1", move.choices[0].slot), RequestEnded)
    assert (end.moves.num_migrations, end.moves.num_notice_migrations) == (1, 1)


def test_what_was_to_end_in_time_and_does_not_is_moved_after_all() -> None:
    """A prediction is no promise: an engine may become slower."""
    rig = DepartureRig()
    rig.begin("r", 1, max_tokens=20)
    rig.add_shard("s1")
    assert not has(rig.notice(5.0), SubmitAttempt)
    assert 1.0 < moved_at(rig.wait(5.0))["r"] - 1.0 <= 3.5


def test_without_another_shard_it_stays_and_then_waits_for_a_later_one() -> None:
    """It is held until its own deadline: patience with outages is for failures."""
    rig = DepartureRig(request_timeout_seconds=300.0)
    rig.begin("r", 1, max_tokens=500)
    actions = [action for _, action in rig.wait(0.1)] + rig.notice(5.0) + [action for _, action in rig.wait(5.0)]
    assert not has(actions, CancelOnShard)
    assert not has(rig.handle(ShardDown("s0")), RequestEnded)
    assert not any(isinstance(action, RequestEnded) for _, action in rig.wait(200.0))
    rig.add_shard("s1")
    move = [action for action in rig.log if isinstance(action, SubmitAttempt)][-1]
    assert (move.shard_id, move.choices[0].output_token_ids) == ("s1", (7,))


def test_the_wait_for_a_later_shard_ends_at_the_deadline_of_the_request() -> None:
    """Every wait has a bound."""
    rig = DepartureRig(request_timeout_seconds=60.0)
    rig.begin("r", 1, max_tokens=500)
    rig.notice(5.0)
    rig.handle(ShardDown("s0"))
    ((at, end),) = [(at, action) for at, action in rig.wait(100.0) if isinstance(action, RequestEnded)]
    assert (at, end.error_reason) == (61.0, ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED)


def test_the_end_of_a_shard_with_notice_is_no_failed_attempt() -> None:
    """However often a request has moved, and however few attempts it may have."""
    rig = DepartureRig(max_attempts=1)
    rig.begin("r", 1, max_tokens=900)
    for number in range(MAX_MOVES + 3):
        rig.notice(5.0, f"s{number}")
        rig.add_shard(f"s{number + 1}")
        if number % 2:
            actions = rig.handle(ShardDown(f"s{number}"))
        else:
            error = KvloomError(ErrorReason.ERROR_REASON_DRAINING, "stopped")
            finish = Finish(1, FinishReason.FINISH_REASON_ERROR, error=error)
            actions = rig.step(f"s{number}", finishes=[finish])
        assert only(actions, SubmitAttempt).shard_id == f"s{number + 1}"


def test_a_notice_that_is_taken_back_moves_nothing_more() -> None:
    """`kvloom undrain` ends it."""
    rig = DepartureRig()
    for slot in (1, 2):
        rig.begin(f"r{slot}", slot, max_tokens=500)
    rig.add_shard("s1")
    assert has(rig.notice(5.0), SubmitAttempt)
    rig.notice(None)
    assert not moved_at(rig.wait(10.0))


WORKS = st.lists(
    st.builds(
        RunningWork,
        request_id=st.uuids().map(str),
        has_started=st.booleans(),
        num_remaining_tokens=st.integers(0, 1000),
        num_context_tokens=st.integers(1, 10_000),
        prefill_seconds=st.floats(1e-6, 10.0),
    ),
    max_size=20,
)


@given(WORKS, st.floats(0.0, 0.2), st.floats(-1.0, 60.0))
def test_each_request_either_ends_in_time_or_leaves(
    works: list[RunningWork], step_seconds: float, seconds: float
) -> None:
    """None is forgotten, and those left last are the ones that are nearly done."""
    leaving = in_order_of_leaving(works, step_seconds, seconds)
    staying = [work for work in works if work not in leaving]
    assert all(ends_in_time(work, step_seconds, seconds) for work in staying)
    started = [work for work in leaving if work.has_started]
    assert leaving[: len(leaving) - len(started)] == [work for work in leaving if not work.has_started]
    assert all(a.num_remaining_tokens >= b.num_remaining_tokens for a, b in itertools.pairwise(started))


@given(WORKS.filter(bool), st.floats(0.1, 600.0))
def test_the_pace_uses_the_time_and_no_more(works: list[RunningWork], seconds: float) -> None:
    """The last move is made before the margin begins, whatever the sizes."""
    departure, now = Departure.within(seconds, 100.0), 100.0
    left = sum(work.prefill_seconds for work in works)
    for work in works:
        assert now <= departure.move_by + 1e-6 * seconds
        now += departure.seconds_until_next(work.prefill_seconds, max(left, work.prefill_seconds), now)
        left -= work.prefill_seconds
    assert departure.move_by < departure.ends_at


def test_an_answer_that_lost_a_choice_before_waits_as_long_as_one_that_did_not() -> None:
    """The patience with the failure of one shard must not end what another shard's notice has stopped."""
    rig = DepartureRig(overload=msgspec.structs.replace(NO_OVERLOAD_CONTROL, outage_patience_seconds=1.0))
    rig.add_shard("s1")
    sent = only(rig.submit("r", slots=(1, 2), max_tokens=500), SubmitAttempt)
    other = {"s0": "s1", "s1": "s0"}[sent.shard_id]
    for choice in sent.choices:
        rig.start(sent.shard_id, choice.slot)
    moved = only(rig.fail(sent.shard_id, sent.choices[1].slot), SubmitAttempt)
    assert moved.shard_id == other
    rig.notice(100.0, sent.shard_id)
    assert not has(rig.handle(ShardDown(other)), RequestEnded)
    rig.now += 0.5
    assert not has(rig.handle(ShardDown(sent.shard_id)), RequestEnded)
    assert not [action for _, action in rig.wait(20.0) if isinstance(action, RequestEnded)]
    rig.add_shard("s2")
    assert only([a for a in rig.log[-20:] if isinstance(a, SubmitAttempt) and a.shard_id == "s2"], SubmitAttempt)
