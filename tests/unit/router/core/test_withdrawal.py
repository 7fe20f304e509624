"""A model that is withdrawn: what runs ends, also on another shard, and what is new is refused."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.actions import Action, FleetChanged, SubmitAttempt
from router.core.events import ChoiceSpec, LoadReported, ShardDown, ShardLoad
from tests.fakes.core_rig import CoreRig, has, only, sent, submitted

NOT_FOUND = ErrorReason.ERROR_REASON_MODEL_NOT_FOUND


def rig_with(*shard_ids: str) -> CoreRig:
    rig = CoreRig()
    for shard_id in shard_ids:
        rig.add_shard(shard_id)
    return rig


def withdraw(rig: CoreRig, *shard_ids: str, draining: bool = False) -> None:
    for shard_id in shard_ids:
        rig.handle(LoadReported(shard_id, ShardLoad(withdrawn=True, draining=draining)))


def refusal(actions: Sequence[Action]) -> int:
    (finish,) = sent(actions).finishes
    assert finish.error is not None
    return finish.error.reason


def test_new_requests_are_refused_and_running_ones_move_on() -> None:
    """An answer that has begun is finished, even if its shard fails meanwhile."""
    rig = rig_with("s0", "s1")
    shard_id, _ = submitted(rig.submit("runs"))
    rig.start(shard_id, 1)
    withdraw(rig, "s0", "s1")
    assert refusal(rig.submit("new", slots=(2,))) == NOT_FOUND
    moved = only(rig.handle(ShardDown(shard_id)), SubmitAttempt)
    assert moved.shard_id != shard_id
    assert moved.choices[0].output_token_ids == (7,)


def test_an_answer_that_another_router_began_is_taken() -> None:
    """Routers restart during a withdrawal, too."""
    rig = rig_with("s0")
    withdraw(rig, "s0")
    actions = rig.submit("continued", choices=[ChoiceSpec(1, 0, (5,), 1)])
    assert only(actions, SubmitAttempt).choices[0].output_token_ids == (5,)


def test_a_shard_that_is_not_withdrawn_takes_what_is_new() -> None:
    """Only the shards of one machine may go."""
    rig = rig_with("s0", "s1")
    withdraw(rig, "s0")
    assert has(rig.submit("other", slots=(2,)), SubmitAttempt)


def test_the_model_stays_unknown_while_and_after_its_shards_stop() -> None:
    """Shards drain when they stop: a client must not be told to try again, since the model does not come back."""
    rig = rig_with("s0", "s1")
    withdraw(rig, "s0", "s1", draining=True)
    assert refusal(rig.submit("first")) == NOT_FOUND
    rig.handle(ShardDown("s0"))
    assert refusal(rig.submit("second")) == NOT_FOUND
    gone = only(rig.handle(ShardDown("s1")), FleetChanged)
    assert not gone.models
    assert refusal(rig.submit("third")) == NOT_FOUND


def test_a_withdrawal_can_be_taken_back() -> None:
    """The operator pressed Ctrl-C."""
    rig = rig_with("s0")
    withdraw(rig, "s0")
    assert refusal(rig.submit("refused")) == NOT_FOUND
    rig.handle(LoadReported("s0", ShardLoad()))
    assert has(rig.submit("taken"), SubmitAttempt)


def test_clients_hear_of_a_withdrawal() -> None:
    """Edges then send what is new to the model's successor, if there is one."""
    rig = rig_with("s0", "s1")
    withdraw(rig, "s0")
    (model,) = rig.core.fleet.models
    assert not model.is_withdrawn
    (model,) = only(rig.handle(LoadReported("s1", ShardLoad(withdrawn=True))), FleetChanged).models
    assert model.is_withdrawn
    (model,) = only(rig.handle(LoadReported("s1", ShardLoad())), FleetChanged).models
    assert not model.is_withdrawn
