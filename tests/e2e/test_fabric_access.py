"""A fabric that other machines can reach: TLS and API keys on both ports, from the commands that operators give; and
as it runs in a terminal, which Ctrl-C ends."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fabric import (
    RunningFabric,
    assert_all_gone,
    eventually,
    foreground_fabric,
    kvloom_environment,
    run_kvloom,
)
from tests.fakes.certificates import Authority

REVOKED_SECONDS = 10


def test_up_refuses_to_listen_to_everyone_unprotected(tmp_path: Path) -> None:
    """The default of a tool that is tried on a laptop must not become an open API on a server."""
    refused = run_kvloom("up", "--engine", "sim", "--host", "0.0.0.0", env=kvloom_environment(tmp_path))
    assert refused.returncode == 1
    assert "--api-keys" in refused.stderr
    assert "--insecure" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operator's files."""
    found = tmp_path_factory.mktemp("access")
    authority = Authority("issuer")
    (found / "ca.pem").write_bytes(authority.pem)
    authority.issue_to(found, "server")
    return found


@pytest.fixture(scope="module")
def key(folder: Path) -> str:
    added = run_kvloom("keys", "add", "alice", "--file", str(folder / "keys"), env=kvloom_environment(folder))
    assert added.returncode == 0, added.stderr
    return added.stdout.strip()


@dataclasses.dataclass
class Terminal:
    """In which `kvloom up` runs."""

    process: subprocess.Popen[str]
    output: str
    fabric: RunningFabric


@pytest.fixture(scope="module")
def terminal(model_dir: Path, folder: Path, key: str) -> Iterator[Terminal]:
    """A fabric at loopback of IPv6, with TLS and keys, until somebody presses Ctrl-C."""
    assert key
    files = ("--api-keys", "keys", "--tls-certificate", "server.pem", "--tls-key", "server.key")
    arguments = [str(folder / part) if not part.startswith("--") else part for part in files]
    sim = ("--engine", "sim", "--shards", "1", "--host", "::1")
    with foreground_fabric(folder / "data", *sim, *arguments) as (process, fabric, output):
        yield Terminal(process, output, fabric)


@pytest.fixture(scope="module")
def fabric(terminal: Terminal) -> RunningFabric:
    return terminal.fabric


def status_of(fabric: RunningFabric, folder: Path, key: str) -> int:
    request = urllib.request.Request(f"{fabric.http_url}/v1/models", headers={"x-api-key": key})
    try:
        with urllib.request.urlopen(
            request, timeout=5, context=ssl.create_default_context(cafile=str(folder / "ca.pem"))
        ) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_clients_need_tls_and_a_key_on_both_ports(fabric: RunningFabric, folder: Path, key: str) -> None:
    """What the guide promises, with the tools that it names. A removed key is refused while the fabric runs."""
    assert fabric.http_url.startswith("https://")
    assert status_of(fabric, folder, key) == 200
    assert status_of(fabric, folder, "wrong") == 401
    remote = ("--router-address", fabric.router_address, "--tls-ca", str(folder / "ca.pem"), "--max-tokens", "3")
    strangers = kvloom_environment(folder / "elsewhere")
    answered = run_kvloom("chat", "hello", *remote, env={**strangers, "KVLOOM_API_KEY": key})
    assert answered.returncode == 0, answered.stderr
    refused = run_kvloom("chat", "hello", *remote, env=strangers)
    assert refused.returncode == 1
    assert "An API key of this server is needed" in refused.stderr
    operator = run_kvloom("chat", "hello", "--max-tokens", "3", env=fabric.env)
    assert operator.returncode == 0, operator.stderr
    checked = run_kvloom("doctor", "security", env=fabric.env)
    assert checked.returncode == 0, checked.stdout
    assert len(re.findall(r"✓ .* (?:metrics|API): .* refuses strangers", checked.stdout)) == 5
    assert "?" not in checked.stdout
    logs = "\n".join(path.read_text() for path in (folder / "data" / "logs").glob("*.log"))
    assert key not in logs
    assert "key-alice" in logs

    file = str(folder / "keys")
    run_kvloom("keys", "add", "bob", "--file", file, env=strangers)
    assert run_kvloom("keys", "remove", "alice", "--file", file, env=strangers).returncode == 0
    assert "alice" not in run_kvloom("keys", "list", "--file", file, env=strangers).stdout
    eventually("the removed key is refused", lambda: status_of(fabric, folder, key) == 401, REVOKED_SECONDS)


def test_a_fabric_listens_at_an_address_of_ipv6(terminal: Terminal) -> None:
    """There are clusters that have no other. `--host ::1` failed as if its port were taken."""
    assert re.search(r"clients +HTTP \[::1\]:\d+, gRPC \[::1\]:\d+: TLS, API keys", terminal.output)
    assert re.search(r"metrics +127\.0\.0\.1 .*: TLS, API keys", terminal.output)
    assert re.fullmatch(r"https://\[::1\]:\d+", terminal.fabric.http_url)
    assert re.fullmatch(r"\[::1\]:\d+", terminal.fabric.router_address)
    for command in (("status",), ("restart", "router", "edge"), ("chat", "Hello", "--max-tokens", "2")):
        done = run_kvloom(*command, env=terminal.fabric.env)
        assert done.returncode == 0, done.stdout + done.stderr


def test_ctrl_c_stops_everything(terminal: Terminal) -> None:
    """Ctrl-C is how most fabrics end: no process may stay, and a new one must be able to start. (The last test of this
    fabric.)"""
    env, pids = terminal.fabric.env, terminal.fabric.pids()
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(timeout=30) == 0
    assert_all_gone(pids)
    gone = run_kvloom("status", "--json", env=env)
    assert gone.returncode == 3
    assert json.loads(gone.stdout)["processes"] == []
    down = run_kvloom("down", env=env)
    assert down.returncode == 3
    assert down.stderr.startswith("error: kvloom is not running")
