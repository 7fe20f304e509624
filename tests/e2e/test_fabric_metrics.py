"""A whole fabric as Prometheus sees it: fixed ports, and lists of what to scrape."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fabric import RunningFabric, eventually, kvloom_environment, run_kvloom

ROLES = ["edge", "router", "safety", "shard", "shard", "shard"]
NAMES = ("safety", "router", "edge", "shard-0", "shard-1", "shard-2")


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def targets(fabric: RunningFabric) -> list[dict[str, Any]]:
    return json.loads(fetch(f"{fabric.http_url}/metrics/targets"))


@pytest.mark.timeout(240)  # it restarts most processes
@pytest.mark.xdist_group("strict")
def test_every_process_is_scraped_at_its_fixed_port(strict_fabric: RunningFabric, tmp_path: Path) -> None:
    """An operator configures Prometheus once, and a restart of processes must not change what it scrapes."""
    base = json.loads((Path(strict_fabric.env["KVLOOM_DATA_DIR"]) / "run" / "config.json").read_text())["metrics"][
        "port"
    ]
    addresses = {f"127.0.0.1:{base + number}": name for number, name in enumerate(NAMES)}
    eventually("all processes are listed", lambda: len(targets(strict_fabric)) == len(NAMES))
    listed = targets(strict_fabric)
    assert {group["targets"][0]: group["labels"]["process"] for group in listed} == addresses
    assert [group["labels"]["role"] for group in listed] == ROLES
    for group in listed:
        prefix = f"kvloom_{group['labels']['role']}_"
        assert prefix in fetch(f"{group['labels']['__scheme__']}://{group['targets'][0]}/metrics")

    file = tmp_path / "targets.json"
    done = run_kvloom("metrics", "targets", "--file", str(file), env=strict_fabric.env)
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text()) == listed

    done = run_kvloom("restart", "router", "edge", "shard-0", env=strict_fabric.env)
    assert done.returncode == 0, done.stderr
    shown = {process["metrics_address"] for process in strict_fabric.processes()} - {""}
    assert shown == set(addresses)
    for address in addresses:
        assert "kvloom_" in fetch(f"http://{address}/metrics")

    other = kvloom_environment(tmp_path / "other")
    ports = ("--http-port", "0", "--router-port", "0", "--metrics-port", str(base))
    done = run_kvloom("up", "--engine", "sim", *ports, env=other)
    assert done.returncode == 1
    assert f"127.0.0.1:{base}: another process uses the port" in done.stderr
    assert "--metrics-port" in done.stderr
