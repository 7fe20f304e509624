"""`kvloom up`, `down`, `status`, `logs` as users meet them: what they print, how they fail, what they leave behind."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.fabric import (
    KVLOOM,
    START_TIMEOUT_SECONDS,
    RunningFabric,
    assert_all_gone,
    eventually,
    foreground_fabric,
    kvloom_environment,
    run_kvloom,
)

on_the_shared_fabric = pytest.mark.xdist_group("sim")


@on_the_shared_fabric
def test_status_tells_tools_what_runs(sim_fabric: RunningFabric):
    """The JSON is an interface: scripts find URLs, pids and roles there."""
    status = sim_fabric.status()
    assert status["http_url"].startswith("http://127.0.0.1:")
    host, port = status["router_address"].split(":")
    socket.create_connection((host, int(port)), timeout=5).close()
    roles = sorted(process["role"] for process in status["processes"])
    assert roles == ["edge", "redis", "router", "safety", "shard", "shard"]
    assert all({"role", "name", "pid", "state"} <= process.keys() for process in status["processes"])
    assert {process["state"] for process in status["processes"]} == {"ready"}
    table = run_kvloom("status", env=sim_fabric.env)
    assert table.returncode == 0
    assert "shard-1" in table.stdout


@on_the_shared_fabric
def test_a_load_shows_what_clients_of_the_fabric_see(sim_fabric: RunningFabric):
    """Operators size a fabric by it: requests of both kinds are answered, and every figure is there."""
    for how in (("--concurrency", "3"), ("--rate", "20")):
        sizes = ("--seconds", "0.5", "--max-tokens", "4", "--prompt-words", "8")
        done = run_kvloom("bench", "load", *how, *sizes, "--json", env=sim_fabric.env)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["answered"] == report["requests"] > 0
        assert not report["errors"]
        assert report["ttft_ms"]["p50"] > 0
        assert report["output_tokens_per_second"] > 0
    refused = run_kvloom("bench", "load", "--model", "no-such", "--seconds", "0.2", "--json", env=sim_fabric.env)
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["errors"].keys() == {"model_not_found"}


@on_the_shared_fabric
def test_doctor_finds_a_fabric_closed_to_strangers_as_it_was_started(sim_fabric: RunningFabric):
    """What `kvloom up` starts must be safe without a setting; the command must say what it has tried."""
    done = run_kvloom("doctor", "security", "--json", env=sim_fabric.env)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout + done.stderr
    assert {finding["outcome"] for finding in findings.values()} == {"ok"}
    assert {"secret", "Redis", "shard-0 port", "shard-1 port", "router port", "safety port"} <= findings.keys()


@on_the_shared_fabric
def test_a_secret_is_rotated_under_a_running_answer(sim_fabric: RunningFabric):
    """Operators rotate secrets while users are served: a stream that began before must reach its end."""
    body = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
    request = urllib.request.Request(
        f"{sim_fabric.http_url}/v1/chat/completions",
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        first = answer.readline()
        for step in ("accept", "use"):
            done = run_kvloom("secret", "rotate", "--step", step, "--settle-seconds", "0", env=sim_fabric.env)
            assert done.returncode == 0, done.stderr
        rest = answer.read()
    assert first.startswith(b"data: ")
    assert rest.rstrip().endswith(b"data: [DONE]")
    assert b'"error"' not in rest
    eventually(
        "all ports serve the new secret",
        lambda: run_kvloom("doctor", "security", env=sim_fabric.env).returncode == 0,
    )
    assert run_kvloom("secret", "rotate", "--step", "finish", env=sim_fabric.env).returncode == 0
    shown = run_kvloom("secret", "show", env=sim_fabric.env)
    assert "used" in shown.stdout
    assert "accepted" not in shown.stdout


@on_the_shared_fabric
def test_logs_shows_one_process_or_all(sim_fabric: RunningFabric):
    """Without knowing where the files lie, a user must get at them."""
    one = run_kvloom("logs", "router", "--lines", "5", env=sim_fabric.env)
    assert one.returncode == 0
    assert '"event":"ready"' in run_kvloom("logs", "router", "--lines", "500", env=sim_fabric.env).stdout
    assert 1 <= len(one.stdout.splitlines()) <= 5
    assert "shard-0 | " in run_kvloom("logs", env=sim_fabric.env).stdout
    unknown = run_kvloom("logs", "nobody", env=sim_fabric.env)
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("error: there is no log of nobody; there are edge, ")


@on_the_shared_fabric
def test_a_second_fabric_is_refused_and_leaves_the_first_alone(sim_fabric: RunningFabric, tmp_path: Path):
    """Two fabrics on one port or one data directory would corrupt each other: the second must say so, at once."""
    before = sim_fabric.pids()
    same_folder = run_kvloom("up", "--engine", "sim", env=sim_fabric.env, timeout_seconds=20)
    assert same_folder.returncode == 1
    assert same_folder.stderr.startswith("error: kvloom is already running with the data directory")
    for name, address in (("HTTP", sim_fabric.http_url), ("ROUTER", sim_fabric.router_address)):
        port = address.rsplit(":", 1)[1]
        models = tmp_path / "models"
        env = kvloom_environment(tmp_path, **{f"KVLOOM_{name}_PORT": port, "KVLOOM_MODEL_CACHE_DIR": str(models)})
        same_port = run_kvloom("up", "--detach", env=env, timeout_seconds=20)
        assert not models.exists(), "a model was converted before the port was tried"
        assert same_port.returncode == 1
        assert same_port.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}: another process uses the port")
    assert sim_fabric.pids() == before


@pytest.mark.long
def test_a_killed_supervisor_takes_its_processes_along(model_dir: Path, tmp_path: Path):
    """kill -9 (or the kernel, short of memory) must not leave half a fabric that holds the ports. (Machines of
    test_fabric_fleet.py die so in every run.)"""
    with foreground_fabric(tmp_path, "--engine", "sim", "--shards", "1") as (process, fabric, _):
        pids = fabric.pids()
        process.kill()
        assert_all_gone(pids)
        assert run_kvloom("status", env=fabric.env).returncode == 3


@pytest.mark.parametrize("detach", [[], pytest.param(["--detach"], marks=pytest.mark.long)])
def test_a_process_that_cannot_start_fails_up_with_its_reason(model_dir: Path, tmp_path: Path, detach: list[str]):
    """What went wrong must be on the screen, not only in a log; and nothing may stay behind."""
    policy = tmp_path / "policy.toml"
    policy.write_text("this is not toml")
    config = tmp_path / "kvloom.toml"
    config.write_text('[safety]\npolicy_file = "policy.toml"\n')
    env = kvloom_environment(tmp_path / "data")
    done = run_kvloom("up", "--engine", "sim", "--config", str(config), *detach, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("error: safety ended with status 1: ")
    assert "policy.toml" in done.stderr
    assert run_kvloom("status", env=env).returncode == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "no-such-model"], "error: no such model: no-such-model"),
        (["--shards", "0"], "error: Invalid value for '--shards'"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(tmp_path: Path, args: list[str], message: str):
    """A typing mistake deserves one clear line, not a stack trace. (tests/unit/tools/test_up_refusals.py has more.)"""
    done = subprocess.run(
        [str(KVLOOM), "up", *args],
        env=kvloom_environment(tmp_path / "data"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
