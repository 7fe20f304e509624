"""`kvloom models sleep` and `wake`, on a fabric with two models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.e2e.conftest import GENERATOR
from tests.e2e.fabric import RunningFabric, eventually, run_kvloom

pytestmark = pytest.mark.xdist_group("models")

BUILTIN = GENERATOR
NUM_LONG_TOKENS = 2000
"""Of an answer that takes 4 s at least, longer than the commands."""


@pytest.fixture
def fabric(models_fabric: RunningFabric) -> RunningFabric:
    return models_fabric


def command(fabric: RunningFabric, *args: str) -> subprocess.CompletedProcess[str]:
    return run_kvloom("models", *args, env=fabric.env)


def ask(fabric: RunningFabric, model: str, max_tokens: int = 4) -> tuple[int, Any]:
    """The status, and the text or the error's message."""
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": max_tokens, "seed": 1}).encode()
    request = urllib.request.Request(f"{fabric.http_url}/v1/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return 200, json.loads(answer.read())["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]


def states(fabric: RunningFabric) -> dict[str, str]:
    processes = fabric.status()["processes"]
    return {process["name"]: process["state"] for process in processes if process["role"] == "shard"}


def kill_shard_of_tiny(fabric: RunningFabric) -> None:
    """Returns when its successor sleeps."""
    (killed,) = [process["pid"] for process in fabric.processes("shard") if process["name"] == "shard-tiny-0"]
    os.kill(killed, signal.SIGKILL)

    def has_successor() -> bool:
        return killed not in [process["pid"] for process in fabric.processes("shard")]

    eventually("it is noticed", has_successor)
    eventually("the restarted shard sleeps", lambda: states(fabric)["shard-tiny-0"] == "asleep")


def test_a_sleeping_model_is_refused_until_it_is_awake(fabric: RunningFabric) -> None:
    """Its memory is free for the others, which notice nothing, and its answers are as before."""
    before = ask(fabric, "tiny")
    done = command(fabric, "sleep", "tiny")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("tiny sleeps\n")
    found = states(fabric)
    assert found.pop("shard-tiny-0") == "asleep"
    assert set(found.values()) == {"ready"}
    status, message = ask(fabric, "tiny")
    assert status == 503
    assert "sleeps" in message
    assert ask(fabric, BUILTIN)[0] == 200
    kill_shard_of_tiny(fabric)
    with urllib.request.urlopen(f"{fabric.http_url}/v1/models", timeout=20) as answer:
        num_ready = {model["id"]: model["num_ready_shards"] for model in json.loads(answer.read())["data"]}
    assert (num_ready[BUILTIN], num_ready["tiny"]) == (2, 0)
    assert "tiny sleeps already" in command(fabric, "sleep", "tiny").stderr
    done = command(fabric, "wake", "tiny")
    assert done.returncode == 0, done.stderr
    assert "shard-tiny-0 is awake after" in done.stdout
    assert ask(fabric, "tiny") == before
    assert "tiny does not sleep" in command(fabric, "wake", "tiny").stderr
    assert "there is no model nope" in command(fabric, "sleep", "nope").stderr


def test_running_answers_end_first_and_ctrl_c_takes_it_back(fabric: RunningFabric) -> None:
    """Nobody loses an answer because of somebody else's memory."""
    body = json.dumps({"model": BUILTIN, "prompt": "x", "max_tokens": NUM_LONG_TOKENS, "stream": True}).encode()
    request = urllib.request.Request(f"{fabric.http_url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.readline()
        argv = ["kvloom", "models", "sleep", BUILTIN]
        with subprocess.Popen(argv, env=fabric.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sleeping:
            assert sleeping.stdout is not None
            assert b"takes no new requests" in sleeping.stdout.readline()
            eventually("routers have heard of it", lambda: ask(fabric, BUILTIN)[0] == 503)
            sleeping.send_signal(signal.SIGINT)
            assert sleeping.wait(20) != 0
        eventually("it is taken back", lambda: ask(fabric, BUILTIN)[0] == 200)
        done = command(fabric, "sleep", BUILTIN)
        assert done.returncode == 0, done.stderr
        assert answer.read().rstrip().endswith(b"[DONE]")
    assert command(fabric, "wake", BUILTIN).returncode == 0


@pytest.mark.long
def test_it_sleeps_on_through_restarts_and_crashes(fabric: RunningFabric) -> None:
    """Also when nothing else is awake, and in routers and edges that start meanwhile."""
    served = {shard["model"] for shard in fabric.processes("shard")}
    for model in served:
        assert command(fabric, "sleep", model).returncode == 0
    assert "sleeps (kvloom models wake" in run_kvloom("status", env=fabric.env).stdout
    done = run_kvloom("restart", "router", "edge", "shard-tiny-0", env=fabric.env)
    assert done.returncode == 0, done.stderr
    assert set(states(fabric).values()) == {"asleep"}
    kill_shard_of_tiny(fabric)
    eventually("the model sleeps, for routers", lambda: "sleeps" in ask(fabric, "tiny")[1])
    for model in served:
        done = command(fabric, "wake", model)
        assert done.returncode == 0, done.stderr
        assert ask(fabric, model)[0] == 200
    assert fabric.status()["phase"] == "ready"
