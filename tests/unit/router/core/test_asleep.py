"""A model whose shards sleep, or are about to: what runs ends, and what is new is refused in words."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.actions import Action, SubmitAttempt
from router.core.events import ChoiceSpec, LoadReported, ShardLoad
from tests.fakes.core_rig import CoreRig, has, only, sent


def rig_with(*shard_ids: str) -> CoreRig:
    rig = CoreRig()
    for shard_id in shard_ids:
        rig.add_shard(shard_id)
    return rig


def fall_asleep(rig: CoreRig, *shard_ids: str, draining: bool = False) -> None:
    for shard_id in shard_ids:
        rig.handle(LoadReported(shard_id, ShardLoad(asleep=True, draining=draining)))


def refusal(actions: Sequence[Action]) -> KvloomError:
    (finish,) = sent(actions).finishes
    assert finish.error is not None
    return finish.error


def test_new_requests_learn_that_the_model_sleeps() -> None:
    """A client must be able to tell an operator's decision from a failure; 503, since the model comes back."""
    rig = rig_with("s0", "s1")
    for draining in (False, True):
        fall_asleep(rig, "s0", "s1", draining=draining)
        error = refusal(rig.submit(f"new-{draining}"))
        assert error.reason == ErrorReason.ERROR_REASON_NO_SHARD_READY
        assert "sleeps" in error.message
    rig.handle(LoadReported("s0", ShardLoad()))
    assert only(rig.submit("awake"), SubmitAttempt).shard_id == "s0"


def test_an_answer_that_has_begun_ends_before_its_shard_sleeps() -> None:
    """Another router may have lost it meanwhile."""
    rig = rig_with("s0")
    fall_asleep(rig, "s0")
    assert has(rig.submit("continued", choices=[ChoiceSpec(1, 0, (5,), 1)]), SubmitAttempt)


def test_a_shard_that_is_awake_takes_what_is_new() -> None:
    """On another machine of the fleet."""
    rig = rig_with("s0", "s1")
    fall_asleep(rig, "s0", draining=True)
    assert only(rig.submit("other"), SubmitAttempt).shard_id == "s1"
