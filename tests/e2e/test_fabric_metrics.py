"""A whole fabric as Prometheus sees it: fixed ports, and lists of what to scrape."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lab.free_ports import pick_free_ports
from tests.conftest import REPOSITORY
from tests.e2e.fabric import RunningFabric, eventually, kvloom_environment, run_kvloom
from tests.metrics_page import TABLES, kind_of, shown_name

PROMETHEUS = shutil.which(
    "prometheus", path=os.pathsep.join([os.environ["PATH"], str(REPOSITORY / "build" / "prometheus" / "usr" / "bin")])
)
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
        role = group["labels"]["role"]
        page = fetch(f"{group['labels']['__scheme__']}://{group['targets'][0]}/metrics")
        assert f"kvloom_{role}_" in page
        shown = {line.split()[2]: line.split()[3] for line in page.splitlines() if line.startswith("# TYPE ")}
        own = {name: kind for name, kind in shown.items() if not name.startswith(("process_", "python_"))}
        (table,) = [table for table in TABLES if table.role == role]
        listed_kinds = {shown_name(record): kind_of(record) for record in table.records.values()}
        made = {name: kind for name, kind in own.items() if not name.endswith("_created")}
        assert made.items() <= listed_kinds.items(), "docs/reference/metrics.md lists what processes serve"

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


@pytest.mark.long
@pytest.mark.xdist_group("strict")
@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not here: deploy/observe/run --only-get unpacks it")
def test_prometheus_scrapes_all_processes_and_loads_the_alerts(strict_fabric: RunningFabric) -> None:
    """`make observe` beside a fabric: every process is up, and every rule can be evaluated."""
    port = pick_free_ports(1)[0]
    env = {**os.environ, "KVLOOM_URL": strict_fabric.http_url, "PROMETHEUS_PORT": str(port)}
    folder = REPOSITORY / "build" / "prometheus" / "data"
    shutil.rmtree(folder, ignore_errors=True)
    with subprocess.Popen([REPOSITORY / "deploy" / "observe" / "run"], env=env) as prometheus:
        try:

            def query(path: str) -> dict[str, Any]:
                try:
                    return json.loads(fetch(f"http://127.0.0.1:{port}/api/v1/{path}"))["data"]
                except OSError:
                    return {}

            def num_up() -> int:
                found = query("query?query=up%7Bjob%3D%22kvloom%22%7D").get("result", [])
                return sum(one["value"][1] == "1" for one in found)

            eventually("all processes are up", lambda: num_up() == len(NAMES), timeout_seconds=60)
            evaluated = '"health":"unknown"'
            eventually(
                "rules are evaluated", lambda: evaluated not in json.dumps(query("rules"), separators=(",", ":")), 60
            )
            rules = [rule for group in query("rules")["groups"] for rule in group["rules"]]
            assert len(rules) == (REPOSITORY / "deploy" / "observe" / "rules.yml").read_text().count("- alert: ")
            assert {rule["health"] for rule in rules} == {"ok"}
            assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
        finally:
            prometheus.terminate()
