"""`kvloom status` says what is true, also when the disk is full and when requests are refused."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.e2e.fabric import RunningFabric, eventually, run_kvloom


@pytest.fixture(scope="module")
def fabric(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    fabric = RunningFabric.start(tmp_path_factory.mktemp("status"), "--engine", "sim", "--shards", "1")
    yield fabric
    fabric.stop()


def ready_status(fabric: RunningFabric) -> int:
    """What the edge's /ready answers."""
    try:
        with urllib.request.urlopen(f"{fabric.http_url}/ready", timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def shown_shards(fabric: RunningFabric) -> list[dict[str, Any]]:
    """By the command, which asks the supervisor: its file is what cannot be written."""
    return [process for process in fabric.status()["processes"] if process["role"] == "shard"]


def test_status_is_current_while_the_disk_takes_no_state(fabric: RunningFabric) -> None:
    """With a full disk it showed the last state that could be written, and a process that had long been replaced."""
    state_file = Path(fabric.env["KVLOOM_DATA_DIR"]) / "run" / "state.json"
    (before,) = shown_shards(fabric)
    state_file.unlink()
    state_file.mkdir()  # every write fails, for root as well
    try:
        os.kill(before["pid"], signal.SIGKILL)
        eventually("the new process is shown", lambda: shown_shards(fabric)[0]["pid"] not in (before["pid"], None))
        assert shown_shards(fabric)[0]["restarts"] == before["restarts"] + 1
        assert run_kvloom("logs", "--lines", "1", env=fabric.env).returncode == 0
    finally:
        state_file.rmdir()


def test_status_and_ready_agree_when_no_request_can_be_served(fabric: RunningFabric) -> None:
    """It said "ready" while every request got a 503."""
    eventually("it serves", lambda: ready_status(fabric) == 200)
    assert run_kvloom("drain", "shard-0", env=fabric.env).returncode == 0
    eventually("the edge knows it", lambda: ready_status(fabric) == 503)
    shown = run_kvloom("status", env=fabric.env)
    assert shown.returncode == 4
    assert shown.stdout.startswith("not ready: ")
    assert "edge: no shard is ready" in shown.stdout
    assert "drained" in shown.stdout
    status = fabric.status()
    assert status["phase"] == "not_ready"
    assert "edge: no shard is ready" in status["not_ready"]
    assert run_kvloom("undrain", "shard-0", env=fabric.env).returncode == 0
    eventually("it serves again", lambda: ready_status(fabric) == 200)
    assert run_kvloom("status", env=fabric.env).returncode == 0


def test_garbage_in_the_registry_leaves_status_and_ready_true(fabric: RunningFabric) -> None:
    """After a restart of the shards nothing was served until somebody had deleted the key by hand, and `status` said
    nothing of it."""
    eventually("it serves", lambda: ready_status(fabric) == 200)
    config = json.loads((Path(fabric.env["KVLOOM_DATA_DIR"]) / "run" / "config.json").read_text())
    (before,) = fabric.processes("shard")
    with redis.Redis.from_url(config["redis"]["url"]) as client:
        client.sadd("kvloom:shard_ids", "garbage")
        client.set("kvloom:shard:garbage", "garbage")
        client.set("kvloom:shard:shard-0", "garbage")
        os.kill(before["pid"], signal.SIGKILL)
    eventually("the new process is known", lambda: fabric.status()["phase"] == "ready" and ready_status(fabric) == 200)
    assert run_kvloom("status", env=fabric.env).returncode == 0
