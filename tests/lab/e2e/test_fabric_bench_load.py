"""Benches that send more than a fabric can serve, on simulated shards and at a size that says nothing about times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fabric import kvloom_environment, run_lab

pytestmark = pytest.mark.long


def report_of(bench: str, model_dir: Path, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    shards = ("--engine", "sim", "--model", str(model_dir), "--shards", "1")
    env = kvloom_environment(tmp_path)
    done = run_lab("bench", bench, *shards, *arguments, "--json", env=env, timeout_seconds=220.0)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(240)
def test_a_flood_beside_a_calm_tenant(model_dir: Path, tmp_path: Path) -> None:
    """Two API keys and three runs on one fabric: what the calm tenant sends is the same in all, and nothing fails."""
    report = report_of("fairness", model_dir, tmp_path, "--seconds", "4", "--max-batch", "2")
    assert [row["run"] for row in report["rows"]] == [
        "alone", "beside the flood", "the flood itself", "beside the flood, as one tenant",
    ]  # fmt: skip
    alone, beside, flood, as_one = report["rows"]
    assert alone["requests"] == beside["requests"] == as_one["requests"] == alone["answered"] > 0
    assert flood["requests"] > 3 * alone["requests"]
    assert not any(row["errors"] for row in report["rows"])
    assert report["capacity_per_second"] > 0
    assert report["served_tokens_per_second"] > 0


@pytest.mark.timeout(240)
def test_an_overload_climbs_the_ladder(model_dir: Path, tmp_path: Path) -> None:
    """The step is read from the router's metrics and the effects from responses: all of the way is real."""
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.svg"
    load = ("--overload-seconds", "4", "--load", "5", "--batch-share", "0.2", "--ttft-slo-seconds", "0.3")
    report = report_of("brownout", model_dir, tmp_path, *load, "--max-tokens", "32", "--plot", str(plot))
    assert not report["without"]["steps"]
    assert not report["without"]["effects"]
    assert report["ladder"]["steps"]
    assert report["ladder"]["effects"]["max_tokens"] > 0
    assert not any(row["errors"] for name in ("ladder", "without") for row in report[name]["phases"])
    assert plot.read_bytes().startswith(b"<?xml")
