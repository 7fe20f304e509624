"""Two teams on one fabric, from the commands that operators give: whose keys work, where, and until when."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping

import pytest

from tests.e2e.fabric import RunningFabric, eventually, run_kvloom

PROMPT = "the same long question of two teams, word after word after word " * 8


@pytest.fixture(
    params=[
        pytest.param("control", marks=pytest.mark.xdist_group("control")),
        pytest.param("colocated", marks=[pytest.mark.xdist_group("colocated"), pytest.mark.long]),
    ]
)
def fabric(request: pytest.FixtureRequest) -> RunningFabric:
    return request.getfixturevalue(f"{request.param}_fabric")


def key_of(fabric: RunningFabric, project: str, *options: str) -> tuple[str, str]:
    """The id of a new key, and the key."""
    command = ("keys", "create", "--project", project, "--create", "--json", *options)
    done = run_kvloom(*command, env=fabric.env)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    return made["id"], made["secret"]


def asked(fabric: RunningFabric, key: str, more: Mapping[str, str] | None = None) -> tuple[int, int]:
    """(status, cached tokens)"""
    body = {"model": "smollm2-135m-instruct", "prompt": PROMPT, "max_tokens": 1}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **(more or {})}
    request = urllib.request.Request(f"{fabric.http_url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            usage = json.load(answer)["usage"]
            return answer.status, usage["prompt_tokens_details"]["cached_tokens"]
    except urllib.error.HTTPError as error:
        error.close()
        return error.code, 0


@pytest.mark.xdist_group("control")
def test_a_key_that_may_name_one_class(control_fabric: RunningFabric) -> None:
    """From the operator's command to the bill: what a key may name, what it is refused, over HTTP and over gRPC, and
    where its usage is."""
    fabric = control_fabric
    _, key = key_of(fabric, "classes/app", "--class", "batch")
    batch, interactive = {"x-kvloom-priority-class": "batch"}, {"x-kvloom-priority-class": "interactive"}
    eventually("the key works", lambda: asked(fabric, key, batch)[0] == 200)
    assert [asked(fabric, key, headers)[0] for headers in (interactive, {})] == [403, 403]
    chat = ("chat", "hello", "--max-tokens", "2", "--router-address", fabric.router_address)
    environment = {**fabric.env, "KVLOOM_DATA_DIR": "/nonexistent", "KVLOOM_API_KEY": key}
    denied = run_kvloom(*chat, env=environment)
    assert (denied.returncode, "may not use the priority class 'interactive'" in denied.stderr) == (1, True)
    changed = run_kvloom("projects", "update", "classes/app", "--default-class", "batch", env=fabric.env)
    assert "all (default batch)" in changed.stdout, changed.stderr
    eventually("the default class holds", lambda: asked(fabric, key)[0] == 200)
    assert run_kvloom(*chat, env=environment).returncode == 0
    show = ("usage", "show", "--tenant", "classes/app", "--by", "class", "--json")

    def used() -> dict[str, int]:
        rows = json.loads(run_kvloom(*show, env=fabric.env).stdout)
        return {row["class"]: row["num_requests"] for row in rows}

    eventually("the usage is metered by class", lambda: used() == {"batch": 3})


def test_two_teams_and_a_revoked_key(fabric: RunningFabric) -> None:
    """What the guide promises. A key works at once, everywhere, survives a restart of control, and ends when it is
    revoked; teams share no cached prompt."""
    search_id, search = key_of(fabric, "loom/search")
    _, other = key_of(fabric, "other/app")
    refused = run_kvloom("keys", "create", "--project", "nobody/app", env=fabric.env)
    assert (refused.returncode, "--create" in refused.stderr) == (1, True), "what an operator needs who has no project"
    assert asked(fabric, "kvl-wrong")[0] == 401
    eventually("the first key works", lambda: asked(fabric, search)[0] == 200)
    eventually("the other key works", lambda: asked(fabric, other)[0] == 200)
    _, fresh = key_of(fabric, "fresh/app")
    eventually("the fresh key works", lambda: asked(fabric, fresh)[0] == 200)
    # A router passes a shard over that seems to hang, as one does for a moment on a machine that others use.
    eventually("the team's own prompt is cached", lambda: asked(fabric, search)[1] > 0)
    chat = ("chat", "hello", "--max-tokens", "2", "--router-address", fabric.router_address)
    for key, code in ((search, 0), ("kvl-wrong", 1)):
        done = run_kvloom(*chat, env={**fabric.env, "KVLOOM_DATA_DIR": "/nonexistent", "KVLOOM_API_KEY": key})
        assert done.returncode == code, done.stderr
    restarted = run_kvloom("restart", "control", env=fabric.env)
    assert restarted.returncode == 0, restarted.stderr
    assert asked(fabric, search)[0] == 200
    revoked = run_kvloom("keys", "revoke", search_id, env=fabric.env)
    assert revoked.returncode == 0, revoked.stderr
    eventually("the revoked key is refused", lambda: {asked(fabric, search)[0] for _ in range(4)} == {401})
    assert asked(fabric, other)[0] == 200
