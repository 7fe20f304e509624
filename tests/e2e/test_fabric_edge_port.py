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

from tests.e2e.fabric import RunningFabric, eventually

NUM_CLIENTS = 24
"""Each with a connection of its own, which the kernel gives to any socket: one of two gets some."""
NUM_TOKENS = 450
"""Of a long answer, which takes 9 s."""
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def two_edges(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    fabric = RunningFabric.start(tmp_path_factory.mktemp("two-edges"), "--engine", "sim", "--edges", "2")
    yield fabric
    fabric.stop()


def asked(url: str, **fields: object) -> urllib.request.Request:
    body = {"model": MODEL, "prompt": "Hello", "seed": 1, **fields}
    return urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def ask(url: str) -> None:
    """Over a connection of its own. Raises OSError, also when no answer comes."""
    with urllib.request.urlopen(asked(url, max_tokens=1), timeout=10.0) as response:
        assert response.read()


@contextlib.contextmanager
def begun(process: dict[str, Any], num_tokens: int = NUM_TOKENS) -> Iterator[Any]:
    """A long stream of that edge."""
    request = asked(f"http://{process['metrics_address']}", max_tokens=num_tokens, stream=True)
    with urllib.request.urlopen(request, timeout=30.0) as stream:
        assert stream.readline()
        yield stream


def edge(fabric: RunningFabric, name: str) -> dict[str, Any]:
    return next(process for process in fabric.processes("edge") if process["name"] == name)


@contextlib.contextmanager
def successor_held(fabric: RunningFabric, name: str, before: int) -> Iterator[None]:
    """Stop the process that is to take the place of process `before` while it starts, and let it continue
    afterwards."""
    supervisor = psutil.Process(fabric.status()["supervisor_pid"])
    found: list[int] = []

    def is_there() -> bool:
        for child in supervisor.children():
            with contextlib.suppress(psutil.Error):
                if child.pid != before and name in child.cmdline():
                    found.append(child.pid)
                    return True
        return False

    eventually(f"a successor of {name}", is_there)
    os.kill(found[0], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(found[0], signal.SIGCONT)
    eventually(f"the new {name} serves", lambda: edge(fabric, name)["pid"] == found[0])
    eventually("it is ready", lambda: edge(fabric, name)["state"] == "ready")


def test_clients_of_an_edge_that_died_are_served_by_the_others_while_it_restarts(two_edges: RunningFabric):
    """A socket that listens for a process which is not there yet has half of the clients wait for seconds."""
    pid = edge(two_edges, "edge-1")["pid"]
    os.kill(pid, signal.SIGKILL)
    with successor_held(two_edges, "edge-1", pid):
        for _ in range(NUM_CLIENTS):
            ask(two_edges.http_url)


def test_clients_of_an_edge_that_is_stopping_are_served_by_the_others(two_edges: RunningFabric):
    """It ends what it has begun, which may take half a minute, and no longer reads its socket: a client that landed
    there would wait that long, and then be cut off."""
    before = edge(two_edges, "edge-1")
    with begun(before) as stream:
        os.kill(before["pid"], signal.SIGTERM)
        with successor_held(two_edges, "edge-1", before["pid"]):
            for _ in range(NUM_CLIENTS):
                ask(two_edges.http_url)
            assert psutil.pid_exists(before["pid"])
        assert b"[DONE]" in stream.read()
    assert edge(two_edges, "edge-1")["restarts"] == before["restarts"] + 1


def test_the_only_edge_is_replaced_when_it_is_told_to_stop(model_dir: Path, tmp_path: Path):
    """Its clients wait for its successor, which starts at once; no client is refused, and running requests end
    normally."""
    fabric = RunningFabric.start(tmp_path, "--engine", "sim")
    try:
        (only,) = fabric.processes("edge")
        with begun(only, 150) as stream:
            os.kill(only["pid"], signal.SIGTERM)
            for _ in range(3):
                ask(fabric.http_url)
            assert b"[DONE]" in stream.read()
        eventually("the new edge is known", lambda: fabric.processes("edge")[0]["pid"] != only["pid"])
    finally:
        fabric.stop()
