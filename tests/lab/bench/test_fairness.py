"""What `kvloom-lab bench fairness --engine` counts."""

from __future__ import annotations

import click.testing
import pytest

from lab.bench.arrivals import Requests
from lab.bench.fairness import bench_fairness
from lab.bench.fairness_run import FabricFairnessPlan, row_of, served_per_second
from tools.bench.streams import MeasuredStream

PLAN = FabricFairnessPlan(requests=Requests(10, 8, 1), calm_load=0.2, flood_factor=10.0, seconds=12.0)


def test_a_row_counts_what_its_tenant_got_while_requests_were_sent() -> None:
    """A refused request must not pass for an answered one, nor a client that has left for a refusal."""
    done = {"finish_reason": "length", "num_output_tokens": 9, "num_prompt_tokens": 18}
    sent = [
        (1.0, MeasuredStream("warm-up", 9, sent_at=101.0, pieces_at=[103.0, 104.0], **done)),
        (4.0, MeasuredStream("counted", 9, sent_at=104.0, pieces_at=[104.5, 106.0], **done)),
        (5.0, MeasuredStream("refused", 9, sent_at=105.0, error="full", error_code="queue_full", status=429)),
        (6.0, MeasuredStream("left", 9, sent_at=106.0)),
        (8.0, MeasuredStream("late", 9, sent_at=108.0, pieces_at=[109.5, 113.0], **done)),
    ]
    assert PLAN.warm_up_seconds == 3.0
    assert row_of(sent, 100.0, PLAN) == {
        "requests": 4,
        "answered": 2,
        "errors": 1,
        "error_codes": ["queue_full"],
        "tokens_per_second": 2.0,  # 9 of the warm-up's request and 9 of the counted one, in 9 seconds
        "ttft_p50": 1.0,
        "ttft_p99": pytest.approx(1.49),
    }
    assert served_per_second(sent, 100.0, PLAN) == 6.0


def test_options_without_an_effect_are_refused() -> None:
    """A figure of another experiment than the one that was asked for would mislead."""
    runner = click.testing.CliRunner()
    for arguments, problem in (
        (("--engine", "sim", "--profile", "8b"), "--profile is for --engine model"),
        (("--max-batch", "3"), "--max-batch is for --engine torch or sim"),
        (("--seconds", "10"), "--seconds: at least 20 with modelled shards"),
    ):
        done = runner.invoke(bench_fairness, arguments)
        assert (done.exit_code, problem in str(done.output)) == (1, True), done.output
