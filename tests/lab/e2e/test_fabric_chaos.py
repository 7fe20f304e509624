"""Some of `kvloom-lab chaos`: every kind of process is killed or hung while every answer is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.fabric import kvloom_environment, run_lab

MINUTES = 1
SEED = "3194"
"""Of which models, the control service, Redis and routers are struck within that time."""
SMOKE_MINUTES, SMOKE_SEED = "0.18", "3"
"""With this seed a router and a shard are killed in that time, which is the least that leaves time for faults."""


@pytest.mark.long
@pytest.mark.timeout(480)
def test_a_minute_of_chaos_loses_doubles_and_changes_nothing(
    model_dir: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    """The promise of the whole fabric, at once and with real processes; docs/operate/reliability.md has the long run.
    Fewer users and shards than there, for machines with two cores, and two models, which come and go. The users are
    those of three tenants, whose keys are revoked and whose limits change meanwhile."""
    scratch = tmp_path_factory.mktemp("chaos")
    done = run_lab(
        *("chaos", "--minutes", str(MINUTES), "--seed", SEED, "--shards", "2", "--users", "8", "--json"),
        *("--models", "2", "--tenants", "3"),
        *("--model", str(model_dir)),
        env=kvloom_environment(tmp_path, TMPDIR=str(scratch)),
        timeout_seconds=60.0 * MINUTES + 340.0,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == [], done.stderr
    assert done.returncode == 0
    verdicts = report["verdicts"]
    assert (verdicts["wrong"], verdicts["lost"], verdicts["doubled"], verdicts["miscounted"]) == (0, 0, 0, 0)
    assert report["num_faults"] >= 6 * MINUTES
    assert report["requests"] > 70 * MINUTES
    num_over_limits = sum(row["refused"] for row in report["tenancy"]["tenants"])
    assert verdicts["ok"] > 0.7 * (report["requests"] - num_over_limits)
    assert report["metering"]["exact"] > 0
    assert report["absences"]["sleep-model: 503 no_shard_ready"] > 0
    assert report["absences"]["unload-model: 404 model_not_found"] > 0
    _check_tenants(report["tenancy"])
    incarnations = {row["name"]: row["incarnations"] for row in report["memory"]}
    assert max(incarnations.values()) > 1, incarnations
    assert not list(scratch.iterdir())
    left_over = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in left_over if str(scratch) in line]


def _check_tenants(found: dict[str, Any]) -> None:
    """What must not happen is among the problems; here, that there was something to check."""
    assert found["reconciliation"]["difference"] == 0
    assert found["reconciliation"]["exact"] > 50 * MINUTES
    assert found["changes"]["keys revoked"] > 0
    assert found["trespasses"]["revoked key: 401"] > 0
    assert found["trespasses"]["other tenant: 404"] > 0
    hostile = found["hostile"]
    assert min(hostile[name] for name in ("answered", "with_claims", "with_tickets")) > 5 * MINUTES
    assert hostile["received_tokens"] > 0
    ample, rated, scarce = found["tenants"]
    assert min(ample["complete"], rated["complete"], scarce["complete"]) > 0
    assert scarce["refused"] + scarce["cut_short"] > 0
    assert 0.5 * scarce["budget_nanos"] < scarce["spent_nanos"] <= scarce["budget_nanos"]


@pytest.mark.timeout(180)
def test_some_seconds_of_chaos_lose_double_and_change_nothing(model_dir: Path, tmp_path: Path):
    """A smaller run of the same, whose every part works: faults, users, their checks and the report."""
    done = run_lab(
        *("chaos", "--minutes", SMOKE_MINUTES, "--seed", SMOKE_SEED, "--shards", "2", "--users", "4", "--json"),
        *("--edges", "1", "--routers", "1", "--faults", "kill-shard,kill-router", "--model", str(model_dir)),
        env=kvloom_environment(tmp_path),
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == [], done.stderr
    assert done.returncode == 0
    verdicts = report["verdicts"]
    assert (verdicts["wrong"], verdicts["lost"], verdicts["doubled"], verdicts["miscounted"]) == (0, 0, 0, 0)
    assert report["num_faults"] == 2
    assert verdicts["ok"] > 0.7 * report["requests"] > 0
    assert report["metering"]["exact"] > 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_stored_responses_survive_some_chaos(model_dir: Path, tmp_path: Path):
    """What a client was told to be stored is found, whole, when the orchestrator and what uses it were killed."""
    done = run_lab(
        *("chaos", "--stored", "--minutes", "0.7", "--seed", "3", "--shards", "2", "--users", "6", "--json"),
        *("--faults", "kill-orchestrator,hang-orchestrator,kill-edge,kill-router", "--model", str(model_dir)),
        env=kvloom_environment(tmp_path),
        timeout_seconds=240.0,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == [], done.stderr
    assert done.returncode == 0
    assert report["num_faults"] >= 4
    assert report["endpoints"]["stored response"] > 20
    assert report["stored"]["ok"] > 0.7 * sum(report["stored"].values())
    assert max(row["incarnations"] for row in report["memory"] if row["name"] == "orchestrator") > 1


def test_stored_responses_need_an_orchestrator(tmp_path: Path):
    """Without --stored there is nothing to kill, and a run that skips all of its faults would prove nothing."""
    done = run_lab("chaos", "--faults", "kill-orchestrator", env=kvloom_environment(tmp_path), timeout_seconds=60.0)
    assert done.returncode == 2
    assert "--stored" in done.stderr


def test_an_unknown_fault_is_named(tmp_path: Path):
    """The message must say what there is."""
    done = run_lab("chaos", "--faults", "flood", env=kvloom_environment(tmp_path), timeout_seconds=60.0)
    assert done.returncode == 2
    assert "flood" in done.stderr
    assert "kill-shard" in done.stderr
