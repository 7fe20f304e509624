"""One request is followed through the logs of all processes, and no secret is in any of them."""

from __future__ import annotations

import json
import time
import urllib.request

import pytest

from tests.e2e.fabric import RunningFabric, run_kvloom

pytestmark = pytest.mark.xdist_group("sim")

MODEL = "smollm2-135m-instruct"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRETS = ("sk-very-secret-bearer", "very-secret-api-key", "very secret prompt", "very-secret-resume-token")
WAIT_SECONDS = 10.0


def ask(fabric: RunningFabric, request_id: str) -> str:
    """The id of the answer."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": SECRETS[2]}], "max_tokens": 2}
    headers = {
        "Content-Type": "application/json",
        "x-request-id": request_id,
        "traceparent": TRACEPARENT,
        "Authorization": f"Bearer {SECRETS[0]}",
        "x-api-key": SECRETS[1],
    }
    url = f"{fabric.http_url}/v1/chat/completions?token={SECRETS[3]}"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=30) as answer:
        return json.load(answer)["id"]


def lines_about(fabric: RunningFabric, request_id: str) -> list[str]:
    """The lines, once each of the three processes has written its own."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        done = run_kvloom("logs", "--request-id", request_id, env=fabric.env)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        if {line[:4] for line in lines} >= {"edge", "rout", "shar"} or time.monotonic() > deadline:
            return lines


def test_a_request_is_followed_by_either_of_its_ids(sim_fabric: RunningFabric) -> None:
    """The client's id, which is all that a user has, leads to every line in edge, router and shard, in order."""
    response_id = ask(sim_fabric, "mine-to-follow")
    lines = lines_about(sim_fabric, "mine-to-follow")
    assert {line[:4] for line in lines} >= {"edge", "rout", "shar"}
    for line in lines:
        assert "client_request_id=mine-to-follow" in line
        assert f"request_id={response_id}" in line
        assert TRACEPARENT in line
        assert "tenant=key-" in line
    times = [line.split("| ", 1)[1].split(" ", 1)[0] for line in lines]
    assert times == sorted(times)
    assert lines_about(sim_fabric, response_id) == lines
    explained = run_kvloom("explain", "--request-id", "mine-to-follow", "--json", env=sim_fabric.env)
    assert explained.returncode == 0, explained.stderr
    assert json.loads(explained.stdout)["request_id"] == response_id


def test_no_secret_is_in_any_log(sim_fabric: RunningFabric) -> None:
    """Logs are read by more people than secrets are meant for."""
    ask(sim_fabric, "mine-with-secrets")
    lines_about(sim_fabric, "mine-with-secrets")
    everything = run_kvloom("logs", "--since", "1h", env=sim_fabric.env).stdout
    assert "mine-with-secrets" in everything
    assert [secret for secret in SECRETS if secret in everything] == []
