"""Machines that share no Redis: one with shards, and one with all the rest, which finds them by a name. Here they are
data directories on one machine, each with a loopback address of its own."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from lab.free_ports import pick_free_ports
from tests.e2e.fabric import eventually, kvloom_environment, run_kvloom

SHARDS, FRONT = "127.0.0.5", "127.0.0.6"


def up(env: dict[str, str], *flags: str) -> None:
    done = run_kvloom("up", "--detach", "--engine", "sim", "--sim-step-ms", "5", *flags, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def answer(url: str) -> str:
    """What the model says; "": it is not served."""
    body = json.dumps({"model": "told", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5})
    request = urllib.request.Request(f"{url}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20.0) as response:
            return json.load(response)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        if error.code in (404, 503):
            return ""
        raise


@pytest.mark.long  # two fabrics; tests/integration/test_named_shards.py has the router's part
def test_a_front_finds_shards_that_come_go_and_return(model_dir: Path, tmp_path: Path) -> None:
    """A cluster without Redis is to serve as one with it does: whichever pod is first, and after shards were
    replaced."""
    secret = tmp_path / "fabric.secret"
    secret.touch(mode=0o600)
    secret.write_text(run_kvloom("secret", "new", env=dict(os.environ)).stdout)
    config = tmp_path / "model.toml"
    config.write_text(f'[model]\nname = "told"\npath = "{model_dir}"\n')
    first, second = pick_free_ports(2, SHARDS)
    shards = kvloom_environment(tmp_path / "shards", KVLOOM_SECRET_FILE=str(secret), KVLOOM_CONFIG=str(config))
    front = kvloom_environment(
        tmp_path / "front", KVLOOM_SECRET_FILE=str(secret), KVLOOM_MODEL_CACHE_DIR=str(tmp_path / "no-models")
    )
    start_shards = ("--role", "shard", "--shards", "2", "--shard-port", str(first), "--advertise", SHARDS)
    try:
        names = ("--shards-at", f"{SHARDS}:{first}", "--shards-at", f"{SHARDS}:{second}")
        up(front, "--role", "edge", "--role", "router", "--role", "safety", "--advertise", FRONT, *names)
        url = json.loads(run_kvloom("status", "--json", env=front).stdout)["http_url"]
        assert not answer(url)
        up(shards, *start_shards)
        eventually("the shards are found", lambda: answer(url))
        placed = run_kvloom("explain", "--prompt", "hello", "--json", env=front).stdout
        assert all(f"127-0-0-5-shard-{number}" in placed for number in range(2))
        assert run_kvloom("down", env=shards).returncode == 0
        eventually("the shards are missed", lambda: not answer(url))
        up(shards, *start_shards)
        eventually("the shards are found again", lambda: answer(url))
    finally:
        for env in (front, shards):
            run_kvloom("down", env=env)
