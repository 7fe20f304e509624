"""`kvloom-lab bench data-plane` measures a real fabric; here at a size that says nothing about speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.fabric import kvloom_environment, run_lab

SCALE = "0.008"
"""One of W1's requests, which takes five seconds."""


@pytest.mark.long
@pytest.mark.timeout(300)  # two fabrics are started, one after the other
def test_the_data_plane_bench_counts_every_process_and_loses_no_token(model_dir: Path, tmp_path: Path):
    """A bench that miscounts would steer all tuning: requests complete, every role's CPU is seen, and the engine's
    stamps are read back from the stream."""
    done = run_lab(
        *("bench", "data-plane", "--workload", "W1,W3", "--runs", "1", "--scale", SCALE, "--no-warm-up", "--json"),
        *("--model", str(model_dir)),
        env=kvloom_environment(tmp_path),
        timeout_seconds=240.0,
    )
    assert done.returncode == 0, done.stderr
    paced, short = json.loads(done.stdout)
    assert (paced["workload"], short["workload"]) == ("W1", "W3")
    assert (paced["requests"], short["requests"]) == (1, 16)
    for report in (paced, short):
        assert report["num_errors"] == 0, report["runs"]
        assert report["cpu_us_per_token"].keys() >= {"edge", "router", "safety", "shard", "redis", "sum"}
        assert all(report["cpu_us_per_request"][role] > 0 for role in ("edge", "router", "shard"))
        assert report["cpu_us_per_request"]["safety"] >= 0  # harmless prompts do not come to it
        assert report["added_ttft_ms"]["p50"] > 0
    assert 0 < paced["transit_ms"]["p50"] <= paced["transit_ms"]["p99"]
    assert paced["events_per_read"] >= 1


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_variants_are_measured_alternately(model_dir: Path, tmp_path: Path):
    """What others' long prompts do to a stream is only to be seen while they are really asked for."""
    done = run_lab(
        *(
            "bench",
            "data-plane",
            "--compare",
            "long-prompts",
            "--runs",
            "1",
            "--scale",
            SCALE,
            "--no-warm-up",
            "--json",
        ),
        *("--model", str(model_dir)),
        env=kvloom_environment(tmp_path),
        timeout_seconds=240.0,
    )
    assert done.returncode == 0, done.stderr
    [compared] = json.loads(done.stdout)
    alone, beside = compared["variants"].values()
    assert list(compared["variants"]) == ["alone", "beside long prompts"]
    assert (alone["requests"], beside["requests"]) == (1, 1)
    assert alone["num_errors"] == beside["num_errors"] == 0
    assert beside["cpu_us_per_token"]["edge"] > alone["cpu_us_per_token"]["edge"]
    assert compared["difference"]["transit_ms"]["p99"] is not None


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_fleet_in_one_process_is_measured_as_a_fleet(model_dir: Path, tmp_path: Path):
    """Hundreds of shards are simulated by one process: routers must see each, place on each, and lose no answer."""
    done = run_lab(
        *("bench", "data-plane", "--shards", "6", "--workload", "W3", "--runs", "1"),
        *("--scale", "0.05", "--no-warm-up", "--json", "--model", str(model_dir)),
        env=kvloom_environment(tmp_path),
        timeout_seconds=150.0,
    )
    assert done.returncode == 0, done.stderr
    [short] = json.loads(done.stdout)
    assert (short["requests"], short["num_errors"]) == (100, 0), short["runs"]
    assert short["layout"]["num_shards"] == 6
    assert all(short["cpu_us_per_request"][role] > 0 for role in ("edge", "router", "shard"))


def test_an_unknown_workload_is_named(tmp_path: Path):
    """The message must say what there is."""
    done = run_lab("bench", "data-plane", "--workload", "W9", env=kvloom_environment(tmp_path), timeout_seconds=60.0)
    assert done.returncode == 2
    assert "'W9' is none of W1," in done.stderr
