"""What `kvloom-lab bench brownout --engine` counts."""

from __future__ import annotations

import pytest

from kvloom_common.config import BrownoutConfig
from lab.bench.arrivals import Requests
from lab.bench.brownout_run import BrownoutRun, FabricBrownoutPlan, report_of, row_of
from tools.bench.streams import MeasuredStream

PLAN = FabricBrownoutPlan(
    requests=Requests(10, 40, 1), load=3.0, batch_share=0.4, ttft_slo_seconds=2.0, overload_seconds=24.0
)


def test_the_ladder_is_as_fast_as_the_overload_is_short() -> None:
    """With the default windows it would have climbed when a short experiment is over."""
    ladder, default = PLAN.ladder(), BrownoutConfig()
    assert ladder.min_step_seconds == pytest.approx(default.min_step_seconds / 10)
    assert ladder.hold_seconds == pytest.approx(default.hold_seconds / 10)
    assert [step.max_tokens for step in ladder.steps] == [20, 10, 0]
    assert [(name, begin, end) for name, begin, end, _ in PLAN.phases] == [
        ("before", 0.0, 6.0), ("overload", 6.0, 30.0), ("after", 30.0, 54.0),
    ]  # fmt: skip


def test_a_row_tells_late_refused_and_failed_requests_apart() -> None:
    """Only a first token in time is good, and one that never came must not make the others look fast."""
    streams = [
        MeasuredStream(
            "good", 40, sent_at=0.0, pieces_at=[1.0], finish_reason="length", num_output_tokens=10, status=200
        ),
        MeasuredStream(
            "late", 40, sent_at=0.0, pieces_at=[3.0], finish_reason="length", num_output_tokens=20, status=200
        ),
        MeasuredStream("never", 40, sent_at=0.0),
        MeasuredStream("refused", 40, error="overloaded", error_code="brownout", status=429),
        MeasuredStream("failed", 40, error="lost", status=200),
        MeasuredStream("batch", 40, sent_at=0.0, pieces_at=[1.0], finish_reason="length", is_batch=True, status=200),
        MeasuredStream("shed", 40, error="overloaded", error_code="brownout", status=429, is_batch=True),
    ]
    assert row_of(streams, 10.0, PLAN) == {
        "interactive_per_second": 0.5,
        "goodput_per_second": 0.1,
        "good_share": 0.2,
        "refused_share": 0.2,
        "errors": 1,
        "ttft_p50": 3.0,
        "ttft_p95": None,
        "mean_output_tokens": 15,
        "batch_answered_share": 0.5,
    }


def test_effects_are_those_that_clients_see() -> None:
    """The header of a degraded answer, and the code of a refusal."""
    arrivals = [
        (1.0, MeasuredStream("a", 40, brownout="2; max_tokens=10; no_speculation")),
        (2.0, MeasuredStream("b", 40, brownout="1; max_tokens=20")),
        (3.0, MeasuredStream("c", 40, error="no", error_code="brownout", status=429)),
        (4.0, MeasuredStream("d", 40, error="full", error_code="queue_full", status=429)),
    ]
    report = report_of(BrownoutRun(arrivals, [(2.0, 1)]), PLAN)
    assert report["effects"] == {"max_tokens": 2, "no_speculation": 1, "refused": 1}
