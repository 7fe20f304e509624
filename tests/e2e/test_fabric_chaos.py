"""Some of `kvloom chaos`: every kind of process is killed or hung while every answer is checked."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.e2e.fabric import kvloom_environment, run_kvloom


@pytest.mark.timeout(300)
def test_45_seconds_of_chaos_lose_double_and_change_nothing(model_dir: Path, tmp_path: Path):
    """The promise of the whole fabric, at once and with real processes; docs/reliability.md has the long run. Fewer
    users and shards than there, for machines with two cores."""
    before = {process.pid for process in psutil.process_iter()}
    done = run_kvloom(
        *("chaos", "--minutes", "0.75", "--seed", "11", "--shards", "2", "--users", "8", "--json"),
        *("--model", str(model_dir)),
        env=kvloom_environment(tmp_path),
        timeout_seconds=280.0,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == [], done.stderr
    assert done.returncode == 0
    verdicts = report["verdicts"]
    assert (verdicts["wrong"], verdicts["lost"], verdicts["doubled"], verdicts["miscounted"]) == (0, 0, 0, 0)
    assert report["num_faults"] >= 4
    assert report["requests"] > 50
    assert verdicts["ok"] > 0.7 * report["requests"]
    assert report["ledger"]["exact"] > 0
    left_over = [
        " ".join(process.info["cmdline"] or ())
        for process in psutil.process_iter(["cmdline"])
        if process.pid not in before
    ]
    assert not [line for line in left_over if "kvloom-chaos-" in line]


def test_an_unknown_fault_is_named(tmp_path: Path):
    """The message must say what there is."""
    done = run_kvloom("chaos", "--faults", "flood", env=kvloom_environment(tmp_path), timeout_seconds=60.0)
    assert done.returncode == 2
    assert "flood" in done.stderr
    assert "kill-shard" in done.stderr
