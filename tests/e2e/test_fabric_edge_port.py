"""Edges share a port with one socket each: a socket whose process does not serve must not collect clients."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.fabric import RunningFabric, eventually, run_kvloom
from tools.supervisor.state import RunFolder

NUM_CLIENTS = 24
"""Each with a connection of its own, which the kernel gives to any socket: one of two gets some."""
NUM_TOKENS = 1500
"""Of an answer that takes 15 s and more: it lasts longer than all clients take, and is not read to its end."""
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def key(control_fabric: RunningFabric) -> str:
    made = run_kvloom("keys", "create", "--project", "edges/app", "--create", env=control_fabric.env)
    assert made.returncode == 0, made.stderr
    control_fabric.until_key_is_known(made.stdout.strip())
    return made.stdout.strip()


def asked(url: str, key: str, **fields: object) -> urllib.request.Request:
    body = {"model": MODEL, "prompt": "Hello", "seed": 1, **fields}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    return urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)


def ask(url: str, key: str = "none") -> None:
    """Over a connection of its own. Raises OSError, also when no answer comes."""
    with urllib.request.urlopen(asked(url, key, max_tokens=1), timeout=10.0) as response:
        assert response.read()


@contextlib.contextmanager
def begun(process: dict[str, Any], key: str = "none", num_tokens: int = NUM_TOKENS) -> Iterator[Any]:
    """A long stream of that edge."""
    request = asked(f"http://{process['metrics_address']}", key, max_tokens=num_tokens, stream=True)
    with urllib.request.urlopen(request, timeout=30.0) as stream:
        assert stream.readline()
        yield stream


def edge(fabric: RunningFabric, name: str) -> dict[str, Any]:
    return next(process for process in fabric.processes("edge") if process["name"] == name)


@contextlib.contextmanager
def successor_held(fabric: RunningFabric, name: str, signal_number: int) -> Iterator[None]:
    """Send that edge a signal that ends it. The process that is to take its place is stopped while it starts, and
    continues afterwards. Nothing comes between the signal and the look for it: it listens within a second or two."""
    supervisor = psutil.Process(RunFolder(Path(fabric.env["KVLOOM_DATA_DIR"])).require_running().supervisor_pid)
    before = edge(fabric, name)["pid"]
    found: list[psutil.Process] = []

    def is_there() -> bool:
        for child in supervisor.children():
            with contextlib.suppress(psutil.Error):
                if child.pid != before and name in child.cmdline():
                    child.suspend()
                    found.append(child)
                    return True
        return False

    os.kill(before, signal_number)
    eventually(f"a successor of {name}", is_there)
    try:
        listening = [one for one in found[0].net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        assert not listening, "the successor was stopped too late: it listens"
        yield
    finally:
        found[0].resume()
    eventually(f"the new {name} serves", lambda: edge(fabric, name)["pid"] == found[0].pid)
    eventually("it is ready", lambda: edge(fabric, name)["state"] == "ready")


@pytest.mark.xdist_group("control")
def test_clients_of_an_edge_that_died_are_served_by_the_others_while_it_restarts(
    control_fabric: RunningFabric, key: str
):
    """A socket that listens for a process which is not there yet has half of the clients wait for seconds."""
    with successor_held(control_fabric, "edge-1", signal.SIGKILL):
        for _ in range(NUM_CLIENTS):
            ask(control_fabric.http_url, key)


@pytest.mark.xdist_group("control")
def test_clients_of_an_edge_that_is_stopping_are_served_by_the_others(control_fabric: RunningFabric, key: str):
    """It ends what it has begun, which may take half a minute, and no longer reads its socket: a client that landed
    there would wait that long, and then be cut off."""
    before = edge(control_fabric, "edge-1")
    with begun(before, key) as stream:
        with successor_held(control_fabric, "edge-1", signal.SIGTERM):
            for _ in range(NUM_CLIENTS):
                ask(control_fabric.http_url, key)
            assert psutil.pid_exists(before["pid"])
        assert stream.readline()
    assert edge(control_fabric, "edge-1")["restarts"] == before["restarts"] + 1


@pytest.mark.xdist_group("sim")
def test_the_only_edge_is_replaced_when_it_is_told_to_stop(sim_fabric: RunningFabric):
    """Its clients wait for its successor, which starts at once; no client is refused, and running requests end
    normally."""
    (only,) = sim_fabric.processes("edge")
    with begun(only, num_tokens=60) as stream:
        os.kill(only["pid"], signal.SIGTERM)
        for _ in range(3):
            ask(sim_fabric.http_url)
        assert b"[DONE]" in stream.read()

    def is_new() -> bool:
        edges = sim_fabric.processes("edge")
        return [edge["state"] for edge in edges] == ["ready"] and edges[0]["pid"] != only["pid"]

    eventually("the new edge is known", is_new)
