"""Two shards with TensorRT-LLM's adapter over the fake library, started by `kvloom up` behind a launcher."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fabric import REPOSITORY, RunningFabric, eventually, run_kvloom
from tests.fakes.tensorrt_llm_engine import write_adapter

MODEL = "smollm2-135m-instruct"
FAKE = """
import sys
from tests.fakes.fake_tensorrt_llm import Variant, installed_tensorrt_llm
sys.fake_tensorrt_llm = installed_tensorrt_llm(Variant(step_seconds=0.02))  # kept: its end would remove the modules
sys.fake_tensorrt_llm.__enter__()  # `import` then finds the fake's modules
"""
LAUNCHER = """#!/bin/bash
# As trtllm-llmapi-launch does, it runs the command as a child, and ends with its status.
export PYTHONPATH={path}
"$@"
exit $?
"""
CONFIG = """
[shard]
engine = "tensorrt_llm"
num_shards = 2
num_prefill_shards = 1
num_blocks = 400
max_model_len = 2048
launcher = ["{launcher}"]

[shard.tensorrt_llm]
adapters = {{ legal = "{adapter}" }}

[shard.tensorrt_llm.options]
guided_decoding_backend = "xgrammar"
lora_config = {{ lora_target_modules = ["attn_q"] }}
cache_transceiver_config = {{ backend = "NIXL", kv_transfer_timeout_ms = 2000 }}

[router.disaggregation]
min_prompt_tokens = 100
"""


@pytest.fixture(scope="module")
def fabric(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    folder = tmp_path_factory.mktemp("tensorrt-llm")
    package = folder / "library" / "tensorrt_llm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    launcher = folder / "launch"
    launcher.write_text(LAUNCHER.format(path=f"{folder / 'library'}:{REPOSITORY}:{REPOSITORY / 'fabric'}"))
    launcher.chmod(0o755)
    adapter = write_adapter(folder / "legal", hidden_size=576)
    (folder / "kvloom.toml").write_text(CONFIG.format(launcher=launcher, adapter=adapter))
    started = RunningFabric.start(folder / "data", "--config", str(folder / "kvloom.toml"))
    yield started
    started.stop()


def ask(fabric: RunningFabric, num_words: int = 5, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": "word " * num_words, "max_tokens": 30, "seed": 7, "temperature": 1, **fields}
    request = urllib.request.Request(
        f"{fabric.http_url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def explain(fabric: RunningFabric, request_id: str) -> list[tuple[int, str]]:
    """The attempts of a request and their shards; 0 is that of its prompt alone."""
    done = run_kvloom("explain", "--request-id", request_id, "--json", env=fabric.env)
    assert done.returncode == 0, done.stderr
    decisions = json.loads(done.stdout)["decisions"]
    return [(decision["attempt_id"], decision["plan"]["picked_shard_id"]) for decision in decisions]


@pytest.mark.long
def test_a_fabric_of_two_roles_serves_and_survives(fabric: RunningFabric) -> None:
    """All parts together: disaggregation, adapters, guides, drains, failover and launchers, as an operator has them."""
    short = ask(fabric)
    assert explain(fabric, short["id"]) == [(1, "shard-1")]
    long = ask(fabric, 300)
    assert explain(fabric, long["id"]) == [(0, "shard-0"), (1, "shard-1")]
    assert long["usage"]["completion_tokens"] == 30
    assert ask(fabric, model=f"{MODEL}:legal")["choices"][0]["text"] != short["choices"][0]["text"]
    assert ask(fabric, structured_outputs={"regex": "[a-z]+"})["usage"]["completion_tokens"] == 30

    (first,) = (shard for shard in fabric.processes("shard") if shard["name"] == "shard-1")
    os.kill(first["pid"], signal.SIGKILL)  # the launcher: the shard must not outlive it
    whole = ask(fabric, 300)
    assert whole["choices"][0]["text"] == long["choices"][0]["text"]
    eventually("shard-1 is there again", lambda: _is_ready(fabric, first), 60.0)

    done = run_kvloom("drain", "shard-0", env=fabric.env)
    assert done.returncode == 0, done.stderr
    assert explain(fabric, ask(fabric, 320)["id"]) == [(1, "shard-1")], "a draining shard computes no prompts"


def _is_ready(fabric: RunningFabric, before: dict[str, Any]) -> bool:
    (now,) = (shard for shard in fabric.processes("shard") if shard["name"] == before["name"])
    return now["state"] == "ready" and now["pid"] != before["pid"]
