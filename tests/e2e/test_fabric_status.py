"""`kvloom status` says what is true, also when the disk is full and when requests are refused."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.e2e.fabric import RunningFabric, eventually, run_kvloom

pytestmark = pytest.mark.xdist_group("sim")


def ready_status(fabric: RunningFabric) -> int:
    """What the edge's /ready answers."""
    try:
        with urllib.request.urlopen(f"{fabric.http_url}/ready", timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def num_ready_shards(fabric: RunningFabric) -> int:
    with urllib.request.urlopen(f"{fabric.http_url}/v1/models", timeout=5) as answer:
        return sum(model["num_ready_shards"] for model in json.loads(answer.read())["data"])


def shown_shards(fabric: RunningFabric) -> list[dict[str, Any]]:
    """By the command, which asks the supervisor: its file is what cannot be written."""
    return [process for process in fabric.status()["processes"] if process["role"] == "shard"]


def test_status_is_current_while_the_disk_takes_no_state(sim_fabric: RunningFabric) -> None:
    """With a full disk it showed the last state that could be written, and a process that had long been replaced."""
    supervisor, *_ = sim_fabric.pids()
    state_file = Path(sim_fabric.env["KVLOOM_DATA_DIR"]) / "run" / "state.json"
    before = shown_shards(sim_fabric)[0]
    state_file.unlink()
    state_file.mkdir()  # every write fails, for root as well
    try:
        os.kill(before["pid"], signal.SIGKILL)
        eventually("the new process is shown", lambda: shown_shards(sim_fabric)[0]["pid"] not in (before["pid"], None))
        assert shown_shards(sim_fabric)[0]["restarts"] == before["restarts"] + 1
        assert run_kvloom("logs", "--lines", "1", env=sim_fabric.env).returncode == 0
    finally:
        state_file.rmdir()
        os.kill(supervisor, signal.SIGHUP)  # a reload writes it again
        eventually("the state can be read", state_file.is_file)
        eventually("the new process is ready", lambda: shown_shards(sim_fabric)[0]["state"] == "ready")


def test_status_and_ready_agree_when_no_request_can_be_served(sim_fabric: RunningFabric) -> None:
    """It said "ready" while every request got a 503."""
    eventually("it serves", lambda: ready_status(sim_fabric) == 200)
    for shard in ("shard-0", "shard-1"):
        assert run_kvloom("drain", shard, env=sim_fabric.env).returncode == 0
    eventually("the edge knows it", lambda: ready_status(sim_fabric) == 503)
    shown = run_kvloom("status", env=sim_fabric.env)
    assert shown.returncode == 4
    assert shown.stdout.startswith("not ready: ")
    assert "edge: no shard is ready" in shown.stdout
    assert "drained" in shown.stdout
    status = sim_fabric.status()
    assert status["phase"] == "not_ready"
    assert "edge: no shard is ready" in status["not_ready"]
    for shard in ("shard-0", "shard-1"):
        assert run_kvloom("undrain", shard, env=sim_fabric.env).returncode == 0
    eventually("it serves again", lambda: ready_status(sim_fabric) == 200)
    assert run_kvloom("status", env=sim_fabric.env).returncode == 0


def test_garbage_in_the_registry_leaves_status_and_ready_true(sim_fabric: RunningFabric) -> None:
    """After a restart of the shards nothing was served until somebody had deleted the key by hand, and `status` said
    nothing of it."""
    eventually("it serves", lambda: ready_status(sim_fabric) == 200)
    config = json.loads((Path(sim_fabric.env["KVLOOM_DATA_DIR"]) / "run" / "config.json").read_text())
    before = {shard["name"]: shard["pid"] for shard in sim_fabric.processes("shard")}
    with redis.Redis.from_url(config["redis"]["url"]) as client:
        client.sadd("kvloom:shard_ids", "garbage")
        client.set("kvloom:shard:garbage", "garbage")
        for name, pid in before.items():
            client.set(f"kvloom:shard:{name}", "garbage")
            os.kill(pid, signal.SIGKILL)

    def are_known() -> bool:
        now = {shard["name"]: shard["pid"] for shard in shown_shards(sim_fabric)}
        return all(now[name] != pid for name, pid in before.items()) and num_ready_shards(sim_fabric) == len(before)

    eventually("the new processes are known", are_known)
    eventually("it serves", lambda: sim_fabric.status()["phase"] == "ready" and ready_status(sim_fabric) == 200)
    assert run_kvloom("status", env=sim_fabric.env).returncode == 0


def test_doctor_looks_at_the_whole_deployment(sim_fabric: RunningFabric) -> None:
    """It asks supervisors, shards and Redis; of a fabric that is well it has nothing to complain of but what the test's
    machine lacks."""
    done = run_kvloom("doctor", "deployment", "--json", env=sim_fabric.env)
    found = {one["name"]: one for one in json.loads(done.stdout)}
    failed = {name for name, one in found.items() if one["outcome"] == "failed"}
    assert failed <= {"disk"}, found
    assert done.returncode == bool(failed)
    [model] = [name for name in found if name.startswith("model ")]
    for name in ("Redis", "clocks", "versions", model):
        assert found[name]["outcome"] in ("ok", "warning"), found[name]
