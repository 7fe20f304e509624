"""A fabric whose processes have no free file descriptors serves over the connections that it has, and is as before when
there are some again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.fabric import RunningFabric, eventually
from tests.fakes.no_descriptors import no_free_descriptors

BODY = json.dumps({"model": "smollm2-135m-instruct", "prompt": "hello", "max_tokens": 4})


def answers(connection: http.client.HTTPConnection) -> bool:
    try:
        connection.request("POST", "/v1/completions", BODY, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status == 200 and json.loads(response.read())["usage"]["completion_tokens"] == 4
    except (OSError, http.client.HTTPException):
        connection.close()
        return False


def answers_anew(address: str) -> bool:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=20)) as connection:
        return answers(connection)


@pytest.mark.xdist_group("sim")
def test_every_process_survives_a_shortage_of_descriptors(sim_fabric: RunningFabric) -> None:
    """Edge, router, shard, safety service and supervisor at once: none ends, closes its listeners or busies itself with
    its log, and a shard that is killed meanwhile is back as soon as that is possible."""
    fabric = sim_fabric
    logs = Logs(Path(fabric.env["KVLOOM_DATA_DIR"]))
    address = fabric.http_url.removeprefix("http://")
    kept = http.client.HTTPConnection(address, timeout=20)
    try:
        assert answers(kept)
        before = {process["name"]: process["pid"] for process in fabric.status()["processes"]}
        pids = [pid for name, pid in before.items() if name != "redis"] + [fabric.status()["supervisor_pid"]]
        with no_free_descriptors(*pids):
            for _ in range(5):
                assert answers(kept)
            for port in (address, fabric.router_address):
                for _ in range(20):
                    with (
                        contextlib.suppress(OSError, http.client.HTTPException),
                        contextlib.closing(http.client.HTTPConnection(port, timeout=0.05)) as new,
                    ):
                        new.request("GET", "/health")
                        new.getresponse()
            os.kill(before["shard-0"], signal.SIGKILL)
            eventually("the death of the shard is noticed", lambda: "SIGKILL" in logs.new())
        eventually("new connections are served", lambda: answers_anew(address), 60.0)
        after = {process["name"]: process["pid"] for process in fabric.status()["processes"]}
        assert {name for name in before if before[name] != after[name]} == {"shard-0"}
        assert "Traceback" not in logs.new()
        assert len(logs.new()) < 500_000
    finally:
        kept.close()


class Logs:
    """What is written to them from now on."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "logs"
        self._num_before = {path.name: path.stat().st_size for path in self._folder.glob("*.log")}

    def new(self) -> str:
        texts = {path.name: path.read_bytes() for path in self._folder.glob("*.log")}
        new = [text[self._num_before.get(name, 0) :] for name, text in texts.items()]
        return "\n".join(text.decode(errors="replace") for text in new)
