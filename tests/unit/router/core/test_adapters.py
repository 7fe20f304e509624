"""Requests for an adapter are placed on shards that have it, best where it is loaded, and never mix with others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvloom.adapters import Adapter
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.text.block_hash import block_hashes, root_hash
from router import convert
from router.core.actions import Action, SubmitAttempt
from router.core.events import (
    AdaptersReported,
    ChoiceSpec,
    KvChange,
    KvEventsArrived,
    LoadReported,
    Request,
    ShardAdapter,
    ShardDown,
    ShardLoad,
)
from router.core.fleet.fleet import FleetAdapter
from router.core.placement import PlacementPlan
from tests.fakes.core_rig import CoreRig, has, only, sent, submitted

LAWYER = Adapter("lawyer", "1")
PROMPT = list(range(40))


def rig_of(**shards: list[ShardAdapter]) -> CoreRig:
    rig = CoreRig()
    for shard_id, states in shards.items():
        rig.add_shard(shard_id)
        rig.handle(AdaptersReported(shard_id, states, 1.0))
    return rig


def state(name: str = "lawyer", checksum: str = "1", *, loaded: bool = False) -> ShardAdapter:
    return ShardAdapter(name, checksum, loaded, 8)


def refusal(actions: Sequence[Action]) -> KvloomError:
    (finish,) = sent(actions).finishes
    assert finish.error is not None
    return finish.error


def plan(rig: CoreRig, adapter: Adapter | None, prompt: list[int] = PROMPT) -> PlacementPlan:
    wanted = Request("plan", "c", "m", prompt, "", [ChoiceSpec(1, 0)], 10, adapter=adapter)
    return rig.core.plan(wanted, rig.now)


def test_only_shards_that_have_the_adapter_are_candidates() -> None:
    """Another shard would refuse it; one that has another adapter of this name would answer something else."""
    rig = rig_of(s0=[], s1=[state(checksum="2")], s2=[state()])
    assert submitted(rig.submit(adapter=LAWYER))[0] == "s2"
    reasons = {shard.shard_id: shard.filtered_reason for shard in plan(rig, LAWYER).shards}
    assert "has no adapter lawyer" in reasons["s0"]
    assert "has no adapter lawyer" in reasons["s1"]
    assert not reasons["s2"]


def test_a_loaded_adapter_is_worth_some_queueing_but_not_any() -> None:
    """The estimate counts the load in seconds, as it does the queue."""
    rig = rig_of(s0=[state()], s1=[state(loaded=True)])
    placed = plan(rig, LAWYER)
    assert placed.picked_shard_id == "s1"
    costs = {shard.shard_id: shard for shard in placed.shards}
    assert costs["s0"].cost_terms["adapter"] == 1.0
    assert costs["s0"].predicted_ttft_seconds == pytest.approx(costs["s1"].predicted_ttft_seconds + 1.0)
    rig.handle(LoadReported("s1", ShardLoad(num_waiting=9, num_queued_prefill_tokens=50_000)))
    assert plan(rig, LAWYER).picked_shard_id == "s0"


def test_requests_without_an_adapter_go_anywhere_and_cost_no_load() -> None:
    """Adapters are nothing to them."""
    rig = rig_of(s0=[], s1=[state(loaded=True)])
    assert {shard.cost_terms["adapter"] for shard in plan(rig, None).shards} == {0.0}


def test_no_block_is_shared_between_adapters() -> None:
    """The same prompt has other KV under every adapter, and under a new one of the old name."""
    rig = rig_of(s0=[state(), state("poet", "1")], s1=[state(checksum="2")])
    hashes = block_hashes(PROMPT, 4, root_hash("m", "1"))
    rig.handle(KvEventsArrived("s0", 1, [KvChange(stored=hashes)]))
    rig.handle(KvEventsArrived("s1", 1, [KvChange(stored=hashes)]))

    def overlaps(adapter: Adapter | None) -> dict[str, int]:
        return {shard.shard_id: shard.num_overlap_tokens for shard in plan(rig, adapter).shards}

    assert overlaps(LAWYER)["s0"] == 39
    assert set(overlaps(None).values()) == {0}
    assert set(overlaps(Adapter("lawyer", "2")).values()) == {0}


def test_a_shard_is_told_the_adapter_and_the_salt_that_its_blocks_get() -> None:
    """Router and shard hash a prompt alike, or no prefix would be found again."""
    rig = rig_of(s0=[state()])
    submit = convert.submit_to_proto(
        only(rig.submit(adapter=LAWYER, tenant="t", cache_salt="salt"), SubmitAttempt), packs_token_ids=True
    )
    assert (submit.adapter.name, submit.adapter.checksum) == LAWYER
    assert (submit.cache_salt, submit.tenant) == ("salt", "t")
    plain = convert.submit_to_proto(only(rig.submit("plain", slots=(2,)), SubmitAttempt), packs_token_ids=True)
    assert not plain.HasField("adapter")


def test_an_answer_fails_over_to_the_same_adapter_only() -> None:
    """The rest of an answer must be of the adapter that began it, whatever now has its name."""
    rig = rig_of(s0=[state()], s1=[state(checksum="2")], s2=[])
    shard_id, slots = submitted(rig.submit(adapter=LAWYER))
    assert shard_id == "s0"
    rig.start("s0", slots[0])
    rig.add_shard("s3")
    rig.handle(AdaptersReported("s3", [state()]))
    assert only(rig.handle(ShardDown("s0")), SubmitAttempt).shard_id == "s3"
    assert refusal(rig.handle(ShardDown("s3"))).reason == ErrorReason.ERROR_REASON_SHARD_LOST


def test_an_unknown_adapter_is_not_found() -> None:
    """Neither is one that was replaced while its answer was on its way to another router."""
    rig = rig_of(s0=[state()])
    error = refusal(rig.submit(adapter=Adapter("poet", "1")))
    assert error.reason == ErrorReason.ERROR_REASON_MODEL_NOT_FOUND
    assert "'m:poet'" in error.message
    continued = [ChoiceSpec(1, 0, (5,), 1)]
    assert (
        "any more as it was" in refusal(rig.submit("other", adapter=Adapter("lawyer", "2"), choices=continued)).message
    )


def test_an_adapter_is_not_missing_while_its_model_has_no_shard() -> None:
    """A restart of the only shard makes a request wait or come again, as it does for the model alone."""
    rig = rig_of(s0=[state()])
    rig.handle(ShardDown("s0"))
    assert [model.adapters for model in rig.core.fleet.models] == [[FleetAdapter("lawyer", "1", 8, 0)]]
    assert refusal(rig.submit(adapter=LAWYER)).reason == ErrorReason.ERROR_REASON_NO_SHARD_READY


def test_requests_that_wait_for_a_shard_leave_it_with_the_adapter() -> None:
    """They go to another shard that has it, and end with a reason if there is none."""
    rig = rig_of(s0=[state()])
    rig.handle(LoadReported("s0", ShardLoad(num_waiting=9, num_queued_prefill_tokens=50_000)))
    assert not has(rig.submit("a", adapter=LAWYER), SubmitAttempt)
    rig.add_shard("s1")
    rig.handle(AdaptersReported("s1", [state()]))
    assert only(rig.handle(AdaptersReported("s0", [])), SubmitAttempt).shard_id == "s1"
    rig.handle(LoadReported("s1", ShardLoad(num_waiting=9, num_queued_prefill_tokens=50_000)))
    rig.submit("b", slots=(2,), adapter=LAWYER)
    assert refusal(rig.handle(AdaptersReported("s1", []))).reason == ErrorReason.ERROR_REASON_MODEL_NOT_FOUND


def test_clients_learn_the_adapters_of_a_model() -> None:
    """Of two that have one name, they get that of most shards; whether it is loaded is no news to them."""
    rig = rig_of(s0=[state(checksum="2")], s1=[state(), state("poet", "9")], s2=[state(loaded=True)])
    rig.handle(LoadReported("s1", ShardLoad(draining=True)))
    (model,) = rig.core.fleet.models
    assert model.adapters == [FleetAdapter("lawyer", "1", 8, 1), FleetAdapter("poet", "9", 8, 0)]
    before = len(rig.log)
    rig.handle(AdaptersReported("s0", [state(checksum="2", loaded=True)]))
    assert len(rig.log) == before
