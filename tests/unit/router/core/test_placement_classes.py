"""Classes in placement: what an interactive request waits for beside batch prefill, and where batch goes."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from router import convert
from router.core.actions import Action, SubmitAttempt
from router.core.events import TierRank
from router.core.load.load_ledger import LoadLedger
from router.core.load.load_view import Reservation
from router.core.placement.ect import Ect
from router.core.placement.policy import Candidate
from tests.fakes.core_rig import CoreRig, has, only
from tests.unit.router.core.test_placement_policies import ARRIVAL, CANDIDATE

LONG = list(range(1, 8001))


def _rig(num_shards: int = 1, yield_tokens: int = 512) -> CoreRig:
    rig = CoreRig(policy="ect", prefill_chunks=None)
    for number in range(num_shards):
        description = {"num_blocks": 10_000, "max_batch": 64, "max_model_len": 20_000, "yield_tokens": yield_tokens}
        rig.add_shard(f"s{number}", **description)
    return rig


def _ask(rig: CoreRig, name: str, slot: int, *, is_batch: bool = False, **changes: Any) -> list[Action]:
    tier = TierRank.BATCH if is_batch else TierRank.INTERACTIVE
    prompt = [1 + slot * 10_000 + token for token in changes.pop("prompt", LONG)]
    return rig.submit(name, slots=(slot,), tier=tier, prompt_token_ids=prompt, **changes)


def test_an_interactive_request_is_sent_to_a_shard_that_prefills_batch() -> None:
    """The engine lets it go first at its next step; in the router it would wait for the whole batch prompt."""
    rig = _rig()
    assert has(_ask(rig, "batch", 1, is_batch=True), SubmitAttempt)
    assert has(_ask(rig, "interactive", 2), SubmitAttempt)


def test_it_waits_in_the_router_if_the_engine_does_not_yield() -> None:
    """There it can still be overtaken, cancelled and moved, and an engine's queue allows none of this."""
    rig = _rig(yield_tokens=0)
    assert has(_ask(rig, "batch", 1, is_batch=True), SubmitAttempt)
    assert not has(_ask(rig, "interactive", 2), SubmitAttempt)


def test_batch_waits_for_interactive_prefill() -> None:
    """It would give way to it in any case, and is not bound to this shard yet."""
    rig = _rig()
    assert has(_ask(rig, "interactive", 1), SubmitAttempt)
    assert not has(_ask(rig, "batch", 2, is_batch=True), SubmitAttempt)


def test_batch_goes_where_no_interactive_request_is() -> None:
    """Interactive answers would be decoded more slowly beside its prefill."""
    rig = _rig(num_shards=2)
    first = only(_ask(rig, "interactive", 1, prompt=LONG[:100]), SubmitAttempt)
    rig.start(first.shard_id, first.choices[0].slot)
    for slot in range(2, 5):
        sent = only(_ask(rig, f"batch {slot}", slot, is_batch=True, prompt=LONG[:200]), SubmitAttempt)
        assert sent.shard_id != first.shard_id
        rig.start(sent.shard_id, sent.choices[0].slot)


def test_batch_fills_an_idle_shard_while_interactive_requests_wait_for_another() -> None:
    """Work that is free to go anywhere need not wait until no interactive request waits at all."""
    rig = _rig(num_shards=2)
    busy = only(_ask(rig, "first", 1), SubmitAttempt).shard_id
    rig.start(busy, only(rig.log, SubmitAttempt).choices[0].slot)
    same_prompt = [1 + 10_000 + token for token in LONG]
    again = rig.submit("again", slots=(2,), prompt_token_ids=[*same_prompt, *range(90_000, 94_000)])
    assert only(again, SubmitAttempt).shard_id == busy  # its prefix is there
    waiting = rig.submit("waits", slots=(3,), prompt_token_ids=[*same_prompt, *range(95_000, 95_900)])
    assert not has(waiting, SubmitAttempt)
    assert only(_ask(rig, "batch", 4, is_batch=True), SubmitAttempt).shard_id != busy


def test_interrupted_prefill_teaches_no_speed() -> None:
    """A batch prompt whose prefill was interrupted seems to take as long as its last step."""
    ledger = LoadLedger()
    ledger.add_shard("s", "m", 10_000, yield_tokens=512)
    view = ledger.view("s")
    ledger.reserve(("batch", 1), Reservation("s", 1, 8000, 0, 500, 0.0, class_rank=2))
    ledger.reserve(("interactive", 2), Reservation("s", 1, 100, 0, 7, 0.5))
    ledger.note_starts("s", [(("interactive", 2), 0.0)], 0.7)
    ledger.note_starts("s", [(("batch", 1), 0.0)], 0.8)
    assert view.speed.num_observations == 0
    ledger.reserve(("batch", 3), Reservation("s", 1, 8000, 0, 500, 1.0, class_rank=2))
    ledger.note_starts("s", [(("batch", 3), 0.0)], 1.8)
    assert view.speed.num_observations == 1
    ledger.check_integrity()


candidates = st.builds(
    lambda queue, own, held: msgspec.structs.replace(
        CANDIDATE, queue_seconds=queue, own_seconds=own, held_seconds=held
    ),
    st.floats(0, 100),
    st.floats(0.001, 10),
    st.lists(st.floats(0, 10), max_size=5),
)


@given(candidates, st.floats(0, 1), st.integers(0, 100))
def test_what_yields_makes_a_shard_cheaper_and_urgent_work_dearer(
    candidate: Candidate, share: float, num_urgent: int
) -> None:
    """For whatever load: prefill that gives way is no reason to avoid a shard, and urgent work there always is one for
    a request that is less urgent."""
    cost = sum(Ect().costs(ARRIVAL, [candidate])[0])
    yielding = msgspec.structs.replace(candidate, yielding_seconds=share * candidate.queue_seconds)
    urgent = msgspec.structs.replace(candidate, num_urgent=num_urgent)
    assert sum(Ect().costs(ARRIVAL, [yielding])[0]) <= cost + 1e-9
    assert sum(Ect().costs(ARRIVAL, [urgent])[0]) >= cost
    assert yielding.predicted_ttft_seconds >= candidate.held_ahead_seconds + candidate.own_seconds - 1e-9


def test_a_shard_is_told_the_rank_of_other_classes_only() -> None:
    """Fabrics whose requests name no class send nothing more than before."""
    rig = _rig()
    plain = convert.submit_to_proto(only(_ask(rig, "plain", 1), SubmitAttempt), packs_token_ids=True)
    assert not plain.HasField("class_rank")
    rig = _rig()
    batch = convert.submit_to_proto(only(_ask(rig, "b", 1, is_batch=True), SubmitAttempt), packs_token_ids=True)
    assert batch.class_rank == 2
