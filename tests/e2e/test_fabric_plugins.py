"""A fabric made of the plugins of docs/how-to/plugins.md, started as users start it."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fabric import RunningFabric, kvloom_environment, run_kvloom
from tests.fakes.plugin_site import PluginSite

GROUPS = (
    "kvloom.parsers",
    "kvloom.placement_policies",
    "kvloom.engines",
    "kvloom.safety_rules",
    "kvloom.auth_providers",
)
TOKENS = """
class Tokens:
    def __init__(self, settings):
        self._ids = settings["ids"]

    async def authenticate(self, credentials):
        from kvloom import ErrorReason, KvloomError

        given = credentials.headers.get("x-api-key", "")
        if given not in self._ids:
            raise KvloomError(ErrorReason.UNAUTHENTICATED, "Unknown token.")
        return self._ids[given]
"""
CONFIG = """
[router.placement]
policy = "canary"

[shard]
engine = "echo"
num_shards = 1

[shard.plugin]
step_seconds = 0.001

[safety]
policy_file = "policy.toml"

[callers]
provider = "tokens"

[callers.plugin.ids]
t1 = "alice"
"""
POLICY = '[[rules]]\nname = "card"\nkind = "card_number"\nmessage = "No cards."\n'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the packages are installed; a provider that needs no other service stands in for that of the page."""
    with pytest.MonkeyPatch.context() as patch:
        site = PluginSite(tmp_path_factory.mktemp("site"), patch)
        for group in GROUPS:
            site.install_example(group)
        site.install("tokens", "kvloom.auth_providers", {"tokens": "tokens:Tokens"}, TOKENS)
        yield site.folder


@pytest.fixture(scope="module")
def fabric(model_dir: Path, site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "kvloom.toml").write_text(CONFIG)
    (folder / "policy.toml").write_text(POLICY)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    started = RunningFabric.start(folder / "data", "--config", str(folder / "kvloom.toml"), PYTHONPATH=path)
    yield started
    started.stop()


def ask(fabric: RunningFabric, text: str, token: str) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 40, "model": "smollm2-135m-instruct"}
    request = urllib.request.Request(
        f"{fabric.http_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"x-api-key": token, "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_a_fabric_of_plugins_serves_and_refuses(fabric: RunningFabric) -> None:
    """Engine, policy, rule and provider work together, each in its own process."""
    status, answer = ask(fabric, "hello there", "t1")
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] > 0
    status, refused = ask(fabric, "hello there", "t2")
    assert (status, refused["error"]["message"]) == (401, "Unknown token.")
    status, blocked = ask(fabric, "my card is 4111111111111111", "t1")
    assert (status, blocked["error"]["code"]) == (400, "content_filter")
    assert blocked["error"]["message"] == "No cards."


def test_the_commands_of_the_fabric_know_them(fabric: RunningFabric) -> None:
    """`doctor plugins` lists them, `explain` names the policy's terms, and the operator needs no token."""
    listed = run_kvloom("doctor", "plugins", env=fabric.env)
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert "✓ canary, acme_policy 1.0" in listed.stdout
    said = run_kvloom("chat", "hello", "--max-tokens", "3", env=fabric.env)
    assert said.returncode == 0, said.stderr
    security = run_kvloom("doctor", "security", env=fabric.env)
    assert security.returncode == 0, security.stdout


def test_a_plugin_that_is_missing_stops_the_start(tmp_path: Path, model_dir: Path) -> None:
    """A fabric must not run without the authentication that its configuration names."""
    (tmp_path / "kvloom.toml").write_text('[callers]\nprovider = "tokens"\n')
    environment = kvloom_environment(tmp_path / "data")
    refused = run_kvloom("up", "--engine", "sim", "--config", str(tmp_path / "kvloom.toml"), env=environment)
    assert refused.returncode == 1
    assert "callers.provider: There is no auth provider named 'tokens'" in refused.stderr
    assert "Traceback" not in refused.stderr
