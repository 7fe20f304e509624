"""Where requests are placed, and that the reasons can be read."""

from __future__ import annotations

import pytest

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.text.block_hash import block_hashes, root_hash
from router.core.actions import SubmitAttempt, WantKvSnapshot
from router.core.events import (
    ChoiceSpec,
    KvChange,
    KvEventsArrived,
    KvSnapshotArrived,
    LoadReported,
    Request,
    ShardLoad,
)
from tests.fakes.core_rig import CoreRig, has, only, submitted

PROMPT = list(range(40))


def request(**changes: object) -> Request:
    fields = {
        "request_id": "plan",
        "client_id": "c",
        "model": "m",
        "prompt_token_ids": PROMPT,
        "prompt_text": "",
        "choices": [ChoiceSpec(1, 0)],
        "max_tokens": 10,
    }
    return Request(**(fields | changes))


def hashes(tokens: list[int], salt: str = "") -> list[int]:
    return block_hashes(tokens, 4, root_hash("m", "", salt))


def two_shards(**config: object) -> CoreRig:
    rig = CoreRig(**config)
    rig.add_shard("s0")
    rig.add_shard("s1")
    return rig


@pytest.mark.parametrize("holder", ["s0", "s1"])
def test_prefix_attracts(holder: str) -> None:
    """A request is placed where its KV is cached."""
    rig = two_shards()
    rig.handle(KvEventsArrived(holder, 1, [KvChange(stored=hashes(PROMPT))]))
    assert submitted(rig.submit(prompt_token_ids=PROMPT))[0] == holder


def test_only_what_may_come_from_a_cache_attracts() -> None:
    """What must be computed anew for its log-probabilities costs the same everywhere, and a shard is sent what it may
    expect of its cache; but not where an earlier attempt has reported them."""
    rig = two_shards()
    rig.handle(KvEventsArrived("s0", 1, [KvChange(stored=hashes(PROMPT))]))
    for limit, expected in ((None, 39), (39, 36), (22, 20), (3, 0), (0, 0)):
        plan = rig.core.plan(request(max_cached_tokens=limit), rig.now)
        assert {s.shard_id: s.num_overlap_tokens for s in plan.shards} == {"s0": expected, "s1": 0}
    resumed = request(max_cached_tokens=0, choices=[ChoiceSpec(1, 0, [8, 9])])
    assert rig.core.plan(resumed, rig.now).shards[0].num_overlap_tokens == 40
    sent = only(rig.submit(prompt_token_ids=PROMPT, max_cached_tokens=22), SubmitAttempt)
    assert (sent.shard_id, sent.num_expected_cached_tokens) == ("s0", 20)


def test_queue_outweighs_prefix() -> None:
    """A cache hit is not worth waiting behind much more prefill than it saves."""
    rig = two_shards()
    rig.handle(KvEventsArrived("s0", 1, [KvChange(stored=hashes(PROMPT))]))
    rig.handle(LoadReported("s0", ShardLoad(num_waiting=3, num_queued_prefill_tokens=5000)))
    assert submitted(rig.submit(prompt_token_ids=PROMPT))[0] == "s1"


def test_tenants_do_not_share_a_prefix() -> None:
    """One tenant's requests must not reveal by their speed what another's prompts were."""
    rig = two_shards()
    rig.handle(KvEventsArrived("s0", 1, [KvChange(stored=hashes(PROMPT, "a"))]))
    overlaps = {s.shard_id: s.num_overlap_tokens for s in rig.core.plan(request(cache_salt="b"), rig.now).shards}
    assert overlaps == {"s0": 0, "s1": 0}
    assert rig.core.plan(request(cache_salt="a"), rig.now).picked_shard_id == "s0"


def test_another_tenants_cache_can_be_read_without_a_trace() -> None:
    """A score goes where the caller has left the prompt's blocks, and its own blocks are expected nowhere."""
    rig = two_shards()
    rig.handle(KvEventsArrived("s1", 1, [KvChange(stored=hashes(PROMPT[:20], "a"))]))
    reading = {"tenant": "shadow", "cache_salt": "a", "discards_blocks": True, "prompt_token_ids": PROMPT}
    sent = only(rig.submit(**reading), SubmitAttempt)
    assert (sent.shard_id, sent.num_expected_cached_tokens) == ("s1", 20)
    assert sent.request.cache_salt == "a"
    for tenant, expected in (("a", 20), ("shadow", 0)):
        plan = rig.core.plan(request(cache_salt=tenant), rig.now)
        assert max(shard.num_overlap_tokens for shard in plan.shards) == expected


def test_requests_with_one_new_prefix_go_together() -> None:
    """The second of two concurrent requests waits for the prefix that the first is about to compute."""
    rig = CoreRig()
    for shard_id in ("s0", "s1"):
        rig.add_shard(shard_id, max_model_len=9999, num_blocks=9999)
    first, (slot,) = submitted(rig.submit("a", slots=(1,), prompt_token_ids=[*PROMPT * 100, 1]))
    assert not has(rig.submit("b", slots=(2,), prompt_token_ids=[*PROMPT * 100, 2]), SubmitAttempt)
    second, _ = submitted(rig.start(first, slot))
    assert second == first


def test_own_placements_count_before_the_next_report() -> None:
    """Requests that arrive between two load reports must not all go to the same shard."""
    rig = two_shards()
    picks = {submitted(rig.submit(f"r{i}", slots=(i,), prompt_token_ids=[i] * 80))[0] for i in range(2)}
    assert picks == {"s0", "s1"}


def test_plan_explains_and_places_nothing() -> None:
    """The terms have names and add up; asking changes nothing."""
    rig = two_shards()
    rig.add_shard("small", max_model_len=20)
    rig.add_shard("other", model="n")
    rig.handle(LoadReported("s1", ShardLoad(num_running=2, num_waiting=1, num_queued_prefill_tokens=100)))
    plan = rig.core.plan(request(), rig.now)
    assert rig.core.plan(request(), rig.now) == plan
    assert rig.core.is_idle
    best, second, *filtered = plan.shards
    assert (plan.picked_shard_id, plan.num_prompt_tokens, plan.error) == ("s0", 40, None)
    assert (best.shard_id, second.shard_id) == ("s0", "s1")
    assert (second.num_running, second.num_waiting, second.num_queued_prefill_tokens) == (2, 1, 100)
    assert second.cost_seconds == pytest.approx(sum(second.cost_terms.values()))
    assert second.cost_terms["queue"] > 0.005
    assert second.predicted_ttft_seconds > best.predicted_ttft_seconds > 0
    reasons = {shard.shard_id: shard.filtered_reason for shard in filtered}
    assert reasons == {"small": "window of 20 tokens, 50 needed", "other": "serves n"}


def test_plan_says_why_nothing_was_picked() -> None:
    """The plan has the error that the request itself would get, or states that the request would wait."""
    rig = CoreRig()
    rig.add_shard(max_batch=1)
    error = rig.core.plan(request(model="x"), rig.now).error
    assert error is not None
    assert error.reason == ErrorReason.ERROR_REASON_MODEL_NOT_FOUND
    rig.submit("a", slots=(1, 2))
    plan = rig.core.plan(request(), rig.now)
    assert plan.error is not None
    assert plan.error.reason == ErrorReason.ERROR_REASON_QUEUE_FULL
    assert [shard.filtered_reason for shard in plan.shards] == ["full"]


def test_equal_shards_share_by_seed() -> None:
    """Ties are broken evenly, and identically on a replay."""
    histories = []
    for _ in range(2):
        rig = two_shards(policy="least_prefill")
        histories.append([rig.core.plan(request(request_id=f"r{i}"), 1.0).picked_shard_id for i in range(40)])
    assert histories[0] == histories[1]
    assert 10 <= histories[0].count("s0") <= 30


def test_round_robin_takes_turns() -> None:
    """The baseline policy does what its name says."""
    rig = CoreRig(policy="round_robin")
    for i in range(3):
        rig.add_shard(f"s{i}")
    picks = [submitted(rig.submit(f"r{i}", slots=(i,)))[0] for i in range(6)]
    assert sorted(picks[:3]) == ["s0", "s1", "s2"]
    assert picks[3:] == picks[:3]


def test_least_requests_counts_unreported_ones() -> None:
    """The baselines, too, see what was just placed."""
    rig = two_shards(policy="least_requests")
    picks = [submitted(rig.submit(f"r{i}", slots=(i,)))[0] for i in range(4)]
    assert picks.count("s0") == 2


def test_gap_asks_for_one_snapshot() -> None:
    """Lost events are noticed, a snapshot is asked for once, and it repairs the index."""
    rig = two_shards()
    assert not has(rig.handle(KvEventsArrived("s0", 1, [])), WantKvSnapshot)
    assert only(rig.handle(KvEventsArrived("s0", 3, [])), WantKvSnapshot).shard_id == "s0"
    assert rig.handle(KvEventsArrived("s0", 4, [KvChange(stored=hashes(PROMPT))])) == []
    assert rig.core.plan(request(), rig.now).shards[0].num_overlap_tokens == 0
    rig.handle(KvSnapshotArrived("s0", 5, hashes(PROMPT)))
    assert rig.core.plan(request(), rig.now).picked_shard_id == "s0"
    # The last token is always computed.
    assert rig.core.plan(request(), rig.now).shards[0].num_overlap_tokens == 39


def test_unmeasured_speeds_have_defaults() -> None:
    """A shard that has not measured itself yet can be priced."""
    plan = two_shards().core.plan(request(), 1.0)
    assert all(shard.cost_seconds > 0 for shard in plan.shards)


def test_dispatch_names_the_chosen_shard() -> None:
    """The request is dispatched to the shard that `plan` predicted."""
    rig = two_shards()
    foretold = rig.core.plan(request(request_id="r"), rig.now).picked_shard_id
    assert only(rig.submit("r", prompt_token_ids=PROMPT), SubmitAttempt).shard_id == foretold
