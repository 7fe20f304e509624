"""What `kvloom bench load` counts, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.bench.load import LoadPlan, bench_load, report_of
from tools.bench.streams import MeasuredStream

PLAN = LoadPlan(
    rate=None,
    concurrency=2,
    seconds=10.0,
    wait_seconds=1.0,
    num_prompt_words=10,
    max_tokens=8,
    ttft_slo_seconds=1.0,
    seed=1,
)


def test_only_whole_answers_make_the_times() -> None:
    """A refused or unfinished request is counted, and must not make the others look faster or slower."""
    done = {"finish_reason": "length", "num_prompt_tokens": 20}
    sent = [
        MeasuredStream("good", 8, sent_at=1.0, pieces_at=[1.5, 2.0, 3.5], num_output_tokens=5, **done),
        MeasuredStream("late", 8, sent_at=1.0, pieces_at=[3.0], num_output_tokens=1, **done),
        MeasuredStream("refused", 8, sent_at=1.0, error="full", error_code="queue_full"),
        MeasuredStream("broken", 8, sent_at=1.0, pieces_at=[1.1], error="the stream ended without a finish"),
        MeasuredStream("left", 8, sent_at=9.0, pieces_at=[9.1]),
    ]
    report = report_of(sent, PLAN, 10.0)
    assert (report["requests"], report["answered"], report["unfinished"]) == (5, 2, 1)
    assert report["errors"] == {"queue_full": 1, "the stream ended without a finish": 1}
    assert report["good_share"] == 0.2
    assert (report["requests_per_second"], report["output_tokens_per_second"]) == (0.2, 0.6)
    assert report["prompt_tokens_per_second"] == 4.0
    assert report["ttft_ms"] == {"p50": 2000.0, "p90": 2000.0, "p99": 2000.0}
    assert report["tpot_ms"] == {"p50": 500.0, "p90": 500.0, "p99": 500.0}
    assert report["longest_pause_ms"]["p99"] == 1500.0
    assert report_of([], PLAN, 10.0)["ttft_ms"] is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--rate", "3", "--concurrency", "4"), "--rate and --concurrency exclude each other"),
        (("--rate", "3000"), "one client can send 20,000 requests at most"),
        (("--url", "http://127.0.0.1:1"), "the server cannot be reached"),
        (("--url", "127.0.0.1:1"), "--url must begin with http:// or https://"),
        ((), "is not running"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    """A load that was not sent must not look like a fabric that answers nothing."""
    done = CliRunner().invoke(bench_load, [*arguments, "--data-dir", str(tmp_path)])
    assert done.exit_code != 0
    assert problem in done.output
    assert "Traceback" not in done.output
