"""A fabric that other machines can reach: TLS and API keys on both ports, from the commands that operators give."""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fabric import RunningFabric, eventually, kvloom_environment, run_kvloom
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


@pytest.fixture(scope="module")
def fabric(model_dir: Path, folder: Path, key: str) -> Iterator[RunningFabric]:
    assert key
    files = ("--api-keys", "keys", "--tls-certificate", "server.pem", "--tls-key", "server.key")
    arguments = [str(folder / part) if not part.startswith("--") else part for part in files]
    started = RunningFabric.start(folder / "data", "--engine", "sim", *arguments)
    yield started
    started.stop()


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
    assert len(re.findall(r"✓ .* (?:metrics|API): .* refuses strangers", checked.stdout)) >= 6
    assert "?" not in checked.stdout
    logs = "\n".join(path.read_text() for path in (folder / "data" / "logs").glob("*.log"))
    assert key not in logs
    assert "key-alice" in logs

    file = str(folder / "keys")
    run_kvloom("keys", "add", "bob", "--file", file, env=strangers)
    assert run_kvloom("keys", "remove", "alice", "--file", file, env=strangers).returncode == 0
    assert "alice" not in run_kvloom("keys", "list", "--file", file, env=strangers).stdout
    eventually("the removed key is refused", lambda: status_of(fabric, folder, key) == 401, REVOKED_SECONDS)


@pytest.fixture(scope="module")
def ipv6_fabric(model_dir: Path, folder: Path) -> Iterator[RunningFabric]:
    """On loopback of IPv6, with TLS and without keys."""
    env = kvloom_environment(folder / "ipv6")
    tls = ("--tls-certificate", str(folder / "server.pem"), "--tls-key", str(folder / "server.key"))
    started = run_kvloom("up", "--detach", "--engine", "sim", "--shards", "1", "--host", "::1", *tls, env=env)
    assert started.returncode == 0, started.stdout + started.stderr
    assert re.search(r"clients +HTTP \[::1\]:\d+, gRPC \[::1\]:\d+: TLS, no API keys", started.stdout)
    assert re.search(r"metrics +127\.0\.0\.1 .*: TLS, no API keys", started.stdout)
    fabric = RunningFabric.running(env)
    yield fabric
    fabric.stop()


def test_a_fabric_listens_at_an_address_of_ipv6(ipv6_fabric: RunningFabric) -> None:
    """There are clusters that have no other. `--host ::1` failed as if its port were taken."""
    assert re.fullmatch(r"https://\[::1\]:\d+", ipv6_fabric.http_url)
    assert re.fullmatch(r"\[::1\]:\d+", ipv6_fabric.router_address)
    unverified = ssl._create_unverified_context()  # the certificate is for 127.0.0.1
    with urllib.request.urlopen(f"{ipv6_fabric.http_url}/v1/models", timeout=5, context=unverified) as answer:
        assert answer.status == 200
    for command in (("status",), ("chat", "Hello", "--max-tokens", "2"), ("restart", "router", "edge")):
        done = run_kvloom(*command, env=ipv6_fabric.env)
        assert done.returncode == 0, done.stdout + done.stderr


def test_doctor_meets_a_fabric_with_tls_as_its_clients_do(ipv6_fabric: RunningFabric) -> None:
    """It sent plain HTTP, took the failed handshake for a refusal, and called open metrics closed."""
    done = run_kvloom("doctor", "security", "--json", env=ipv6_fabric.env)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    for name in ("edge API", "edge metrics", "router metrics", "shard-0 metrics", "safety metrics"):
        assert found[name]["outcome"] == "warning", found[name]
        assert "serves strangers" in found[name]["detail"]
