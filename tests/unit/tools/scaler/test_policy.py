"""How many shards a load needs."""

from __future__ import annotations

import pytest

from tools.scaler.load import ModelLoad
from tools.scaler.policy import ScalingPolicy, ScalingTargets

TARGETS = ScalingTargets()
IDLE = ModelLoad(num_shards=2, prefill_tokens_per_second=2000.0)


def load(num_shards: int = 2, **fields) -> ModelLoad:
    return ModelLoad(num_shards=num_shards, prefill_tokens_per_second=1000.0 * num_shards, **fields)


def needed(one: ModelLoad) -> int:
    return ScalingPolicy(TARGETS).recommend(one, 0.0).num_needed


@pytest.mark.parametrize(
    ("measure", "shards"),
    [
        ({"kv_usage": 0.8}, 2),
        ({"kv_usage": 1.0}, 3),
        ({"batch_share": 0.9}, 2),
        ({"batch_share": 1.0}, 3),
        ({"computed_tokens_per_second": 1200.0}, 2),
        ({"computed_tokens_per_second": 3000.0}, 5),
        ({"tpot_seconds": 0.04}, 1),
        ({"tpot_seconds": 0.085}, 2),
        ({"tpot_seconds": 0.12}, 3),
        ({"ttft_seconds": 1.9}, 1),
        ({"ttft_seconds": 3.0}, 3),
        ({"ttft_seconds": 1000.0}, 8),
        ({"num_queued_prefill_tokens": 2000}, 1),
        ({"num_queued_prefill_tokens": 60_000}, 4),
    ],
)
def test_each_measure_has_its_target(measure: dict, shards: int) -> None:
    """A fleet grows for whichever of its limits it meets, in proportion, and a late first token says not how much."""
    assert needed(load(**measure)) == shards


def test_the_largest_need_counts() -> None:
    """Spare KV memory is no reason to keep prompts waiting."""
    assert needed(load(kv_usage=0.1, computed_tokens_per_second=3000.0)) == 5


def test_more_at_once_and_fewer_only_after_a_while() -> None:
    """A burst is answered immediately, and a lull between two does not end shards that take minutes to start."""
    policy = ScalingPolicy(TARGETS)
    assert policy.recommend(load(kv_usage=0.4), 0.0).num_shards == 2
    assert policy.recommend(load(kv_usage=1.6), 10.0).num_shards == 4
    for at in range(20, 310, 10):
        assert policy.recommend(load(4, kv_usage=0.2), float(at)).num_shards == 4
    assert policy.recommend(load(4, kv_usage=0.2), 310.0).num_shards == 1


def test_a_policy_that_begins_wants_no_fewer_than_there_are() -> None:
    """A scaler that restarts must not end shards because it has not seen their work."""
    policy = ScalingPolicy(TARGETS)
    assert policy.recommend(IDLE, 1000.0).num_shards == 2
    assert policy.recommend(IDLE, 1299.0).num_shards == 2
    assert policy.recommend(IDLE, 1300.0).num_shards == 0


def test_a_model_that_is_not_used_needs_no_shard() -> None:
    """Until a request waits for one, of whatever size; any use keeps the shard for a while."""
    policy = ScalingPolicy(TARGETS)
    none = ModelLoad(num_shards=0)
    assert policy.recommend(none, 0.0).num_shards == 0
    waits = ModelLoad(num_shards=0, num_queued_requests=1, num_queued_prefill_tokens=1)
    assert policy.recommend(waits, 1000.0).num_shards == 1
    assert policy.recommend(load(1, ttft_seconds=0.1), 1010.0).num_shards == 1
    assert policy.recommend(load(1), 1309.0).num_shards == 1
    assert policy.recommend(load(1), 1310.0).num_shards == 0


def test_what_waits_for_shards_that_are_lost_counts() -> None:
    """After an outage there is more to do than one shard can."""
    policy = ScalingPolicy(TARGETS)
    policy.recommend(load(1), 0.0)
    lost = ModelLoad(num_shards=0, num_queued_requests=50, num_queued_prefill_tokens=90_000)
    assert policy.recommend(lost, 1002.0).num_shards == 3


def test_history_is_bounded_by_its_window() -> None:
    """A scaler runs for months."""
    policy = ScalingPolicy(TARGETS)
    for at in range(5000):
        policy.recommend(load(kv_usage=0.8 - at / 10_000), 5.0 * at)
    assert len(policy._needed) <= TARGETS.scale_in_seconds / 5.0 + 1
