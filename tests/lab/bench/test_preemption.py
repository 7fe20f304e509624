"""What `kvloom-lab bench preemption` sends and counts."""

from __future__ import annotations

import pytest

from kvloom.v1.router_service_pb2 import ExplainResponse, PlacementDecision, RequestOutcome
from lab.bench.preemption import PreemptionPlan, arrival_shares, batch_length, row_of
from tools.bench.streams import MeasuredStream


def test_batch_answers_end_one_after_the_other_and_urgent_requests_come_before_the_last() -> None:
    """If all places were freed at once, or urgent requests came to idle shards, preemption would have nothing to do."""
    plan = PreemptionPlan(5, 1, 100, 3, 1)
    assert [batch_length(number, plan) for number in range(5)] == [50, 62, 75, 87, 100]
    assert arrival_shares(3) == pytest.approx([0.1, 0.35, 0.6])
    assert arrival_shares(1) == [0.1]


def test_a_row_counts_what_preemption_cost_and_broke() -> None:
    """A run that lost or changed an answer must not look like a good one."""
    alone = [MeasuredStream("alone-0", 4, text="same"), MeasuredStream("alone-1", 4, text="same")]
    batch = [
        MeasuredStream("with-0", 4, text="same", sent_at=1.0, pieces_at=[2.0, 3.0, 6.0], num_preemptions=2),
        MeasuredStream("with-1", 4, text="sane", sent_at=1.5, pieces_at=[2.0, 9.0]),
    ]
    urgent = [
        MeasuredStream("u-0", 1, sent_at=1.0, pieces_at=[1.25]),
        MeasuredStream("u-1", 1, sent_at=1.0, error="refused"),
    ]
    first, second = PlacementDecision(decided_at_seconds=1.0), PlacementDecision(decided_at_seconds=4.0)
    second.plan.picked_shard_id = "shard-1"
    second.plan.shards.add(shard_id="shard-1", num_overlap_tokens=16)
    outcome = RequestOutcome(num_prompt_tokens=40)
    explained = {
        "with-0": ExplainResponse(decisions=[first, second], outcome=outcome),
        "with-1": ExplainResponse(decisions=[first], outcome=outcome),
    }
    row = row_of("preemption", urgent, batch, alone, explained)
    assert (row.ttft_p50, row.ttft_p99, row.batch_seconds) == (0.25, 0.25, 8.0)
    assert (row.num_preempted, row.num_preemptions, row.num_tokens_computed_again) == (1, 2, 40 + 2 - 16)
    assert (row.num_errors, row.num_differing_answers) == (1, 1)
