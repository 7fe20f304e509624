"""A whole fabric as Prometheus sees it: fixed ports, and lists of what to scrape."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fabric import RunningFabric, eventually, kvloom_environment, run_kvloom
from tools.supervisor.free_ports import pick_free_ports

ROLES = ["edge", "router", "safety", "shard"]


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def targets(fabric: RunningFabric) -> list[dict[str, Any]]:
    return json.loads(fetch(f"{fabric.http_url}/metrics/targets"))


@pytest.mark.timeout(240)  # it starts a fabric and restarts most of its processes
def test_every_process_is_scraped_at_its_fixed_port(model_dir: Path, tmp_path: Path) -> None:
    """An operator configures Prometheus once, and a restart of processes must not change what it scrapes."""
    base = pick_free_ports(len(ROLES))[0]
    flags = ("--engine", "sim", "--shards", "1", "--model", str(model_dir))
    ports = ("--http-port", "0", "--router-port", "0", "--metrics-port", str(base))
    fabric = RunningFabric.start(tmp_path / "data", *flags, *ports)
    try:
        addresses = {
            f"127.0.0.1:{base + number}": name for number, name in enumerate(("safety", "router", "edge", "shard-0"))
        }
        eventually("all processes are listed", lambda: len(targets(fabric)) == len(ROLES))
        listed = targets(fabric)
        assert {group["targets"][0]: group["labels"]["process"] for group in listed} == addresses
        assert [group["labels"]["role"] for group in listed] == ROLES
        for group in listed:
            prefix = f"kvloom_{group['labels']['role']}_"
            assert prefix in fetch(f"{group['labels']['__scheme__']}://{group['targets'][0]}/metrics")

        file = tmp_path / "targets.json"
        done = run_kvloom("metrics", "targets", "--file", str(file), env=fabric.env)
        assert done.returncode == 0, done.stderr
        assert json.loads(file.read_text()) == listed

        done = run_kvloom("restart", "router", "edge", "shard-0", env=fabric.env)
        assert done.returncode == 0, done.stderr
        shown = {process["metrics_address"] for process in fabric.processes()} - {""}
        assert shown == set(addresses)
        for address in addresses:
            assert "kvloom_" in fetch(f"http://{address}/metrics")

        other = kvloom_environment(tmp_path / "other")
        done = run_kvloom("up", *flags, *ports, env=other)
        assert done.returncode == 1
        assert f"127.0.0.1:{base}: another process uses the port" in done.stderr
        assert "--metrics-port" in done.stderr
    finally:
        fabric.stop()
