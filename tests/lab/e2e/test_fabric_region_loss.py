"""`kvloom-lab chaos --region-loss`: two cells of real processes, one of which is lost twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.fabric import kvloom_environment, run_lab


@pytest.mark.long
@pytest.mark.timeout(480)
def test_the_streams_of_a_lost_cell_go_on_in_the_other(
    model_dir: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The promise of docs/operate/regions.md: none of them differs, is doubled or lost, each is metered once, and a
    resident tenant's never leave their cell."""
    done = run_lab(
        *("chaos", "--region-loss", "--users", "9", "--model", str(model_dir)),
        env=kvloom_environment(tmp_path, TMPDIR=str(tmp_path_factory.mktemp("chaos"))),
        timeout_seconds=400.0,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == [], done.stderr
    assert done.returncode == 0
    assert report["edge_reattached"] >= 2
    assert report["num_sdk_streams_at_the_losses"] > 0
    assert report["num_resident_answers_ended"] + report["num_resident_refusals"] > 0
    assert report["edge_requests_of_east"] > 0
