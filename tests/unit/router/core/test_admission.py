"""Which requests are refused, which wait, and in what order waiting requests are served."""

from __future__ import annotations

from typing import Any

import pytest

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from router.core.actions import FleetChanged, RequestEnded, SubmitAttempt
from router.core.core import CoreConfig, RouterCore
from router.core.events import (
    ChoiceSpec,
    DrainStarted,
    LoadReported,
    RequestCancelled,
    SafetyDown,
    ShardDown,
    ShardLoad,
    Tick,
)
from tests.fakes.core_rig import CoreRig, has, only, sent, submitted


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"model": "other"}, ErrorReason.ERROR_REASON_MODEL_NOT_FOUND, "model"),
        ({"prompt_token_ids": []}, ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "prompt"),
        ({"max_tokens": 0}, ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "max_tokens"),
        ({"max_tokens": 96}, ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED, "stop.max_tokens"),
        (
            {"max_tokens": None, "prompt_token_ids": [1] * 100},
            ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED,
            "prompt_token_ids",
        ),
        ({"slots": (3, 3)}, ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, ""),
    ],
)
def test_unservable_is_refused_at_once(changes: dict[str, Any], reason: int, field: str) -> None:
    """A caller learns at once, by field name, what is wrong; every slot is ended, and the refusal is metered with no
    tokens."""
    rig = CoreRig()
    rig.add_shard()
    actions = rig.submit(**changes)
    finishes = sent(actions).finishes
    assert {finish.slot for finish in finishes} == set(changes.get("slots", (1,)))
    for finish in finishes:
        assert finish.reason == FinishReason.FINISH_REASON_ERROR
        assert finish.error is not None
        assert (finish.error.reason, finish.error.field) == (reason, field)
    ended = only(actions, RequestEnded)
    assert (ended.num_attempts, ended.num_output_tokens, ended.error_reason) == (0, 0, reason)
    assert not has(actions, SubmitAttempt)
    assert rig.core.is_idle


def test_context_length_error_names_the_numbers() -> None:
    """The user must see by how much the request is too long."""
    rig = CoreRig()
    rig.add_shard()
    error = sent(rig.submit(max_tokens=96)).finishes[0].error
    assert error is not None
    for number in ("100", "101", "96", "5"):
        assert number in error.message


def test_fits_the_window_exactly() -> None:
    """Prompt + max_tokens may fill the window to its last token; without max_tokens the rest of the window is used."""
    rig = CoreRig()
    rig.add_shard()
    assert only(rig.submit("a", max_tokens=95), SubmitAttempt).max_tokens == 95
    assert only(rig.submit("b", slots=(2,), max_tokens=None), SubmitAttempt).max_tokens == 95


def test_model_stays_known_when_its_shards_left() -> None:
    """A model without shards is unavailable (503, retry), not unknown (404)."""
    rig = CoreRig()
    rig.add_shard()
    rig.handle(ShardDown("s0"))
    error = sent(rig.submit()).finishes[0].error
    assert error is not None
    assert error.reason == ErrorReason.ERROR_REASON_NO_SHARD_READY
    assert error.retry_after_seconds > 0


def test_duplicate_name_leaves_the_first_alone() -> None:
    """Cancel could not distinguish two live requests with one id."""
    rig = CoreRig()
    rig.add_shard()
    shard_id, [slot] = submitted(rig.submit("r"))
    error = sent(rig.submit("r", slots=(2,))).finishes[0].error
    assert error is not None
    assert error.reason == ErrorReason.ERROR_REASON_DUPLICATE_REQUEST_ID
    assert sent(rig.start(shard_id, slot)).slots == [1]
    rig.finish(shard_id, slot)
    assert submitted(rig.submit("r"))


def test_slot_in_use_is_not_ended_by_a_refusal() -> None:
    """A client that reuses a live slot gets an error, and the choice that runs there continues."""
    rig = CoreRig()
    rig.add_shard()
    rig.submit("a", slots=(1,))
    finishes = sent(rig.submit("b", slots=(1, 2))).finishes
    assert [finish.slot for finish in finishes] == [2]
    assert rig.core.has_request("a")


@pytest.mark.parametrize("state", ["never up", "down", "down for too long"])
def test_safety_required(state: str) -> None:
    """Fail-closed means: without the safety service nothing is served."""
    patience_seconds = 5.0 if state == "down for too long" else 0.0
    rig = CoreRig(safety=None if state == "never up" else (True, True), safety_patience_seconds=patience_seconds)
    rig.add_shard()
    if state != "never up":
        rig.handle(SafetyDown())
    if state == "down for too long":
        rig.now += 5.0
        rig.handle(Tick())
    error = sent(rig.submit()).finishes[0].error
    assert error is not None
    assert error.reason == ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE


def test_safety_not_required() -> None:
    """Fail-open means: without the safety service requests are served unscreened."""
    rig = CoreRig(safety=None, safety_required=False)
    rig.add_shard()
    shard_id, [slot] = submitted(rig.submit())
    assert sent(rig.start(shard_id, slot)).deltas == ["a"]


def test_draining_refuses_new_and_finishes_old() -> None:
    """A draining router lets running requests finish."""
    rig = CoreRig()
    rig.add_shard()
    shard_id, [slot] = submitted(rig.submit("a"))
    assert only(rig.handle(DrainStarted()), FleetChanged).draining
    error = sent(rig.submit("b", slots=(2,))).finishes[0].error
    assert error is not None
    assert error.reason == ErrorReason.ERROR_REASON_DRAINING
    assert sent(rig.start(shard_id, slot)).slots == [1]


def test_waits_for_room_and_is_served_when_there_is_some() -> None:
    """A shard gets at most twice its batch: requests that wait in the router can still be sent elsewhere."""
    rig = CoreRig()
    rig.add_shard(max_batch=1)
    _, [slot] = submitted(rig.submit("a", slots=(1,)))
    rig.submit("b", slots=(2,))
    assert not has(rig.submit("c", slots=(3,)), SubmitAttempt)
    assert only(rig.finish("s0", slot), SubmitAttempt).request.request_id == "c"


def test_new_shard_takes_what_waits() -> None:
    """No request waits while a shard that could run it has room."""
    rig = CoreRig()
    rig.add_shard(max_batch=1)
    for i in range(3):
        rig.submit(f"r{i}", slots=(i,))
    rig.add_shard("s1")
    last = [action for action in rig.log if isinstance(action, SubmitAttempt)][-1]
    assert (last.request.request_id, last.shard_id) == ("r2", "s1")


def test_long_request_does_not_block_a_short_one() -> None:
    """A request that only fits a full shard must not hold up one that fits a shard with room."""
    rig = CoreRig()
    rig.add_shard("small", max_batch=1, max_model_len=20)
    rig.add_shard("large", max_batch=1, max_model_len=100)
    for i in range(2):
        rig.submit(f"l{i}", slots=(i,), max_tokens=80)
    _, [slot] = submitted(rig.submit("s0", slots=(10,), max_tokens=5))
    rig.submit("s1", slots=(11,), max_tokens=5)
    rig.submit("waits-for-large", slots=(12,), max_tokens=80)
    rig.submit("waits-for-small", slots=(13,), max_tokens=5)
    assert only(rig.finish("small", slot), SubmitAttempt).request.request_id == "waits-for-small"


def full_shard() -> tuple[CoreRig, list[int]]:
    """One shard that has as much as it accepts, and the slots in use there."""
    rig = CoreRig()
    rig.add_shard(max_batch=1)
    return rig, [submitted(rig.submit(f"first{i}", slots=(i,)))[1][0] for i in range(2)]


def test_tenants_take_turns() -> None:
    """A tenant with many requests in the queue does not starve one with few."""
    rig, slots = full_shard()
    for i in range(2, 6):
        rig.submit(f"busy{i}", slots=(i,), tenant="busy")
    rig.submit("calm", slots=(9,), tenant="calm")
    served = [only(rig.finish("s0", slot), SubmitAttempt).request.request_id for slot in slots]
    assert served == ["busy2", "calm"]


def test_a_tenant_that_returns_before_its_turn_has_kept_it() -> None:
    """Where queues are longer than patience, a tenant with few requests would otherwise start at the end each time, and
    tenants that always have requests waiting would share the shards among them."""
    rig, slots = full_shard()
    for i in range(2, 8):
        rig.submit(f"busy{i}", slots=(i,), tenant="busy")
    rig.submit("calm", slots=(9,), tenant="calm")
    slots += submitted(rig.finish("s0", slots.pop(0)))[1]
    rig.handle(RequestCancelled("calm"))
    rig.submit("calm again", slots=(10,), tenant="calm")
    assert only(rig.finish("s0", slots.pop(0)), SubmitAttempt).request.request_id == "calm again"


def test_an_unused_turn_is_not_saved_up() -> None:
    """A tenant that returns is next, but what it left unused is not made up for: then the others are served as well."""
    rig, slots = full_shard()
    rig.submit("calm", slots=(9,), tenant="calm")
    for i in range(2, 8):
        rig.submit(f"busy{i}", slots=(i,), tenant="busy")
    rig.handle(RequestCancelled("calm"))
    slots += submitted(rig.finish("s0", slots.pop(0)))[1]
    slots += submitted(rig.finish("s0", slots.pop(0)))[1]
    rig.submit("calm again", slots=(10,), tenant="calm")
    rig.submit("and again", slots=(11,), tenant="calm")
    served: list[str] = []
    for _ in range(4):
        attempt = only(rig.finish("s0", slots.pop(0)), SubmitAttempt)
        served.append(attempt.request.request_id)
        slots.append(attempt.choices[0].slot)
    assert served == ["calm again", "busy4", "and again", "busy5"]


def test_full_queue_refuses_and_keeps_shares() -> None:
    """A full queue refuses at once; a tenant with less than its share gets a place from the tenant with the most."""
    rig = CoreRig(max_queued_requests=2)
    rig.add_shard(max_batch=1)
    for i in range(4):
        rig.submit(f"busy{i}", slots=(i,), tenant="busy")
    refused = sent(rig.submit("busy4", slots=(4,), tenant="busy")).finishes[0]
    assert refused.error is not None
    assert refused.error.reason == ErrorReason.ERROR_REASON_QUEUE_FULL
    assert refused.error.retry_after_seconds > 0
    finishes = sent(rig.submit("calm", slots=(9,), tenant="calm")).finishes
    assert [finish.slot for finish in finishes] == [3]
    assert rig.core.has_request("calm")


def test_queue_timeout() -> None:
    """Waiting has a limit of its own with an error of its own; next_deadline reports to the shell when to tick."""
    rig = CoreRig(max_queue_seconds=2.0, request_timeout_seconds=50.0)
    rig.add_shard(max_batch=1)
    for i in range(3):
        rig.submit(f"r{i}", slots=(i,))
    assert rig.core.next_deadline() == 3.0
    rig.now = 3.0
    finish = sent(rig.handle(Tick())).finishes[0]
    assert finish.slot == 2
    assert finish.error is not None
    assert finish.error.reason == ErrorReason.ERROR_REASON_QUEUE_TIMEOUT
    assert rig.core.next_deadline() == 51.0


def test_queue_ends_when_the_last_shard_goes() -> None:
    """Requests that wait for a shard that no longer exists fail at once."""
    rig = CoreRig()
    rig.add_shard(max_batch=1)
    for i in range(3):
        rig.submit(f"r{i}", slots=(i,))
    reasons = {f.slot: f.error.reason for f in sent(rig.handle(ShardDown("s0"))).finishes if f.error}
    assert reasons[2] == ErrorReason.ERROR_REASON_NO_SHARD_READY
    assert reasons[0] == reasons[1] == ErrorReason.ERROR_REASON_SHARD_LOST


def test_answer_that_is_complete_already_ends_at_once() -> None:
    """A resumed answer that has all its tokens must not be sent to a shard."""
    rig = CoreRig()
    rig.add_shard()
    actions = rig.submit(choices=[ChoiceSpec(1, 0, tuple(range(10)), 20)])
    finish = sent(actions).finishes[0]
    assert (finish.reason, finish.num_output_tokens) == (FinishReason.FINISH_REASON_LENGTH, 10)
    assert only(actions, RequestEnded).num_output_tokens == 0
    assert not has(actions, SubmitAttempt)


def test_fleet_changes_are_sent_to_clients() -> None:
    """Clients know what is served: models, ready shards, the shortest window, and the capabilities that all shards
    share."""
    rig = CoreRig()
    rig.add_shard("s0", capabilities=frozenset({"logprobs", "penalties"}))
    rig.add_shard("s1", max_model_len=50, capabilities=frozenset({"logprobs"}))
    [model] = rig.core.fleet.models
    assert (model.name, model.num_ready_shards, model.max_model_len) == ("m", 2, 50)
    assert model.capabilities == {"logprobs"}
    assert not has(rig.handle(LoadReported("s0", ShardLoad())), FleetChanged)
    changed = only(rig.handle(LoadReported("s0", ShardLoad(draining=True))), FleetChanged)
    assert changed.models[0].num_ready_shards == 1
    assert submitted(rig.submit())[0] == "s1"


@pytest.mark.parametrize("config", [{"policy": "best"}, {"answer_mode": "maybe"}])
def test_unknown_mode_is_refused(config: dict[str, Any]) -> None:
    """A misspelt setting must not silently mean something else."""
    with pytest.raises(ValueError, match="there are"):
        RouterCore(CoreConfig(**config))
