"""A whole fabric as a user starts it, and what a test asks of it. Everything has a time limit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import psutil

from kvloom.v1 import shard_service_pb2, shard_service_pb2_grpc
from kvloom_common.trust.secret import read_secret
from kvloom_common.trust.shared_secret import SharedSecret
from tests.e2e.forked_command import KVLOOM, can_be_forked, run_forked
from tests.fabric_starts import count_start
from tools.supervisor.state import FabricState, RunFolder

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL_CACHE_DIR = REPOSITORY / "build" / "models"
START_TIMEOUT_SECONDS = 300.0


def kvloom_environment(data_dir: Path, **settings: str) -> dict[str, str]:
    """This process's environment without its KVLOOM_ settings, and with free ports."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVLOOM_")}
    return clean | {
        "KVLOOM_DATA_DIR": str(data_dir),
        "KVLOOM_MODEL_CACHE_DIR": str(MODEL_CACHE_DIR),
        "KVLOOM_HTTP_PORT": "0",
        "KVLOOM_ROUTER_PORT": "0",
        # A pip-installed command is found as it is in an activated virtualenv.
        "PATH": f"{KVLOOM.parent}:{clean.get('PATH', '')}",
        **settings,
    }


def run_kvloom(
    *args: str, env: dict[str, str], timeout_seconds: float = START_TIMEOUT_SECONDS, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    if can_be_forked(args, env):
        return run_forked(args, env, timeout_seconds, stdin)
    done = subprocess.run(
        [shutil.which("kvloom", path=env.get("PATH", "")) or str(KVLOOM), *args],
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    if args[0] == "up" and done.returncode == 0:
        count_start()
    return done


@contextlib.contextmanager
def foreground_fabric(data_dir: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], RunningFabric, str]]:
    """`kvloom up` as in a terminal: yields the command, the fabric and what was printed, once it is ready."""
    env = kvloom_environment(data_dir)
    command = [str(KVLOOM), "up", *args]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            output = []
            for line in process.stdout:
                output.append(line)
                if line.startswith("ready: "):
                    break
            assert output[-1].startswith("ready: "), "".join(output)
            count_start()
            yield process, RunningFabric.running(env), "".join(output)
        finally:
            process.kill()


def run_lab(*args: str, env: dict[str, str], timeout_seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run `kvloom-lab`, which starts processes and runs for long."""
    command = [str(KVLOOM.with_name("kvloom-lab")), *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    if done.returncode == 0:
        count_start()
    return done


@dataclasses.dataclass(frozen=True)
class RunningFabric:
    env: dict[str, str]
    http_url: str
    router_address: str

    @classmethod
    def start(cls, data_dir: Path, *args: str, **settings: str) -> RunningFabric:
        env = kvloom_environment(data_dir, **settings)
        done = run_kvloom("up", "--detach", *args, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.fullmatch(r"ready: https?://127\.0\.0\.1:\d+", done.stdout.splitlines()[-1])
        return cls.running(env)

    @classmethod
    def running(cls, env: dict[str, str]) -> RunningFabric:
        """The fabric that already runs with this environment's data directory."""
        state = _state(env)
        return cls(env, state.http_url, state.router_address)

    def stop(self) -> None:
        pids = self.pids()
        done = run_kvloom("down", env=self.env)
        assert done.returncode == 0, done.stderr
        assert_all_gone(pids)

    def status(self) -> dict[str, Any]:
        """What the command says, for tests of it and of what only it finds out, as whether a shard is drained."""
        return json.loads(run_kvloom("status", "--json", env=self.env).stdout)

    def processes(self, role: str = "") -> list[dict[str, Any]]:
        """As the supervisor sees them; without a role, all. They are read from its file: a command for each question
        would cost most tests more than what they test."""
        found = _state(self.env).processes
        return [msgspec.to_builtins(process) for process in found if role in ("", process.role)]

    def is_whole(self) -> bool:
        return all(process["state"] == "ready" for process in self.processes())

    def pids(self) -> list[int]:
        state = _state(self.env)
        return [state.supervisor_pid, *(process.pid for process in state.processes if process.pid is not None)]

    def shard_loads(self) -> list[shard_service_pb2.LoadReport]:
        trust = self.trust()
        return [_shard_load(trust, shard["address"]) for shard in self.processes("shard")]

    def trust(self) -> SharedSecret:
        """What proves to the processes that a test belongs to the fabric."""
        return SharedSecret(read_secret(Path(self.env["KVLOOM_DATA_DIR"]) / "secret"), ("tools",), "test")

    def until_key_is_known(self, key: str) -> None:
        """A new API key reaches each edge by itself."""
        for edge in self.processes("edge"):
            eventually("the key is known", lambda url=f"http://{edge['metrics_address']}": _is_known(url, key))

    def sum_over_shards(self, metric: str) -> float:
        """Of one metric (any labels), as Prometheus would scrape it."""
        pages = [_get(f"http://{shard['metrics_address']}/metrics") for shard in self.processes("shard")]
        samples = re.findall(rf"^{re.escape(metric)}(?:\{{[^}}]*\}})? (\S+)$", "\n".join(pages), re.MULTILINE)
        assert samples, f"no shard exposes {metric}"
        return sum(map(float, samples))


def eventually(what: str, holds: Callable[[], bool], timeout_seconds: float = 20.0) -> None:
    """The fabric tells tests nothing when its state changes: ask until it has."""
    deadline = time.monotonic() + timeout_seconds
    while not holds():
        assert time.monotonic() < deadline, f"after {timeout_seconds:g} s, still not: {what}"
        time.sleep(0.02)  # sleep: the one way to wait for what sends no event


def assert_all_gone(pids: list[int]) -> None:
    def is_gone(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    eventually(f"processes {pids} have gone", lambda: all(map(is_gone, pids)))


def _state(env: dict[str, str]) -> FabricState:
    return RunFolder(Path(env["KVLOOM_DATA_DIR"])).require_running()


def _shard_load(trust: SharedSecret, address: str) -> shard_service_pb2.LoadReport:
    with grpc.secure_channel(address, trust.channel_credentials(), [trust.demanded_of("shard")]) as channel:
        stub = shard_service_pb2_grpc.ShardServiceStub(channel)
        return stub.GetInfo(shard_service_pb2.GetInfoRequest(), timeout=5.0).load


def _is_known(url: str, key: str) -> bool:
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=5.0):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return False


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5.0) as answer:
        return answer.read().decode()
