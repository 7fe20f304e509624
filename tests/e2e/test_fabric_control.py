"""A fabric with tenants, from the commands that its operator gives."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.e2e.fabric import RunningFabric, eventually, run_kvloom

pytestmark = pytest.mark.xdist_group("control")

REVOKED_SECONDS = 10


@pytest.fixture
def fabric(control_fabric: RunningFabric) -> RunningFabric:
    return control_fabric


def kvloom(fabric: RunningFabric, *args: str) -> str:
    done = run_kvloom(*args, env=fabric.env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def status_of(fabric: RunningFabric, key: str, path: str = "/v1/models", body: Any = None) -> int:
    request = urllib.request.Request(fabric.http_url + path, headers={"Authorization": f"Bearer {key}"})
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30.0) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def process_of(fabric: RunningFabric, role: str) -> dict[str, Any]:
    return fabric.processes(role)[0]


def test_a_team_gets_a_key_with_one_command_and_loses_it_with_another(fabric: RunningFabric) -> None:
    """The five minutes that docs/operate/tenancy.md promises."""
    assert status_of(fabric, "kvl-none") == 401
    key = kvloom(fabric, "keys", "create", "--project", "weavers/search", "--create", "--name", "ci").strip()
    eventually("the edge knows of the key", lambda: status_of(fabric, key) == 200, REVOKED_SECONDS)
    chat = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert status_of(fabric, key, "/v1/chat/completions", chat) == 200
    assert json.loads(kvloom(fabric, "status", "--json"))["alarms"] == []
    (listed,) = json.loads(kvloom(fabric, "keys", "list", "--project", "weavers/search", "--json"))
    assert (listed["name"], listed["prefix"]) == ("ci", key[:8])
    assert kvloom(fabric, "keys", "revoke", listed["id"]) == f"revoked {listed['id']}\n"
    eventually("the edge knows of the key", lambda: status_of(fabric, key) == 401, REVOKED_SECONDS)


def test_the_commands_change_limits_roles_and_prices(fabric: RunningFabric) -> None:
    """What they print is what was stored."""
    kvloom(fabric, "projects", "create", "beta/chat", "--create", "--model", "smol*")
    kvloom(fabric, "users", "create", "ann@beta.com", "--role", "beta=member")
    kvloom(fabric, "limits", "set", "tier:gold", "--tokens-per-day", "1000", "--monthly-budget", "12.50")
    shown = json.loads(
        kvloom(fabric, "limits", "set", "tenant:beta/chat", "--tier", "gold", "--requests-per-minute", "5", "--json")
    )
    assert shown["effective_limits"]["tokens_per_day"] == 1000
    assert shown["effective_limits"]["monthly_budget_nanos"] == 12_500_000_000
    assert "requests_per_minute=5" in kvloom(fabric, "limits", "show", "tenant:beta/chat")
    kvloom(fabric, "limits", "clear", "tenant:beta/chat")
    kvloom(fabric, "limits", "clear", "tier:gold")
    price = json.loads(kvloom(fabric, "prices", "set", "unserved", "--prompt", "0.15", "--output", "0.6", "--json"))
    assert (price["prompt_nanos"], price["cached_nanos"], price["output_nanos"]) == (150, 150, 600)
    assert "0.15" in kvloom(fabric, "prices", "list")
    assert "ann@beta.com" in kvloom(fabric, "users", "list", "--org", "beta")
    kvloom(fabric, "orgs", "update", "beta", "--quota", "max_keys=7")
    quotas = json.loads(kvloom(fabric, "orgs", "update", "beta", "--quota", "max_users=9", "--json"))["quotas"]
    assert (quotas["max_keys"], quotas["max_users"]) == (7, 9)
    audit = json.loads(kvloom(fabric, "orgs", "audit", "--org", "beta", "--json"))
    assert audit[-1]["action"] == "CreateOrganisation"
    assert audit[0]["actor"].startswith("cli:")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("keys", "create", "--project", "nobody/there"), "no project 'nobody/there'"),
        (("keys", "create", "--project", "weavers/search", "--expires", "soon"), "30d"),
        (("keys", "add", "alice"), "kvloom keys create"),
        (("keys", "revoke", "unknown"), "no key 'unknown'"),
        (("limits", "set", "weavers"), "tenant:ORG/PROJECT"),
        (("prices", "set", "m", "--prompt", "0.0000001", "--output", "1"), "digits"),
        (("users", "create", "bob", "--role", "weavers"), "ORG=ROLE"),
    ],
)
def test_mistakes_are_explained(fabric: RunningFabric, command: tuple[str, ...], told: str) -> None:
    """One line that says what to do instead."""
    done = run_kvloom(*command, env=fabric.env)
    assert done.returncode != 0
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_restart_of_control_is_not_noticed(fabric: RunningFabric) -> None:
    """Keys work while it is away and afterwards, and the commands wait for it."""
    key = kvloom(fabric, "keys", "create", "--project", "gamma/app", "--create").strip()
    eventually("the edge knows of the key", lambda: status_of(fabric, key) == 200, REVOKED_SECONDS)
    before = process_of(fabric, "control")
    kvloom(fabric, "restart", "control")
    assert status_of(fabric, key) == 200
    after = process_of(fabric, "control")
    assert (after["state"], after["address"]) == ("ready", before["address"])
    assert after["pid"] != before["pid"]
    other = kvloom(fabric, "keys", "create", "--project", "gamma/app").strip()
    eventually("the edge knows of the key", lambda: status_of(fabric, other) == 200, REVOKED_SECONDS)
    assert "control_started" in kvloom(fabric, "logs", "control")
