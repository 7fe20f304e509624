"""The default placement on real shards: conversations find their KV again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.fabric import kvloom_environment, run_lab


@pytest.mark.long
@pytest.mark.timeout(480)  # two fabrics are started, one after the other; a minute, or five without bf16 arithmetic
def test_conversations_find_nearly_all_that_an_infinite_cache_would_have(model_dir: Path, tmp_path: Path):
    """What the fabric is for: at least 90% of it with the default policy, and more than by turns; two torch shards,
    real processes, and nothing left of them."""
    arguments = ["--conversations", "3", "--turns", "5", "--max-tokens", "8", "--think-seconds", "0"]
    done = run_lab(
        "bench",
        "conversations",
        "--model",
        str(model_dir),
        "--json",
        *arguments,
        env=kvloom_environment(tmp_path),
        timeout_seconds=420.0,
    )
    assert done.returncode == 0, done.stderr
    ect, round_robin = json.loads(done.stdout)
    assert (ect["policy"], round_robin["policy"]) == ("ect", "round_robin")
    assert ect["requests"] == round_robin["requests"] == 15
    assert {turn["shard"] for turn in round_robin["turns"]} == {"shard-0", "shard-1"}
    assert ect["cached_share"] >= 0.9
    assert ect["cached_share"] > round_robin["cached_share"]
    assert 0 < ect["ttft_p50"] <= ect["ttft_p99"]


@pytest.mark.long
def test_two_turns_are_compared_with_an_infinite_cache(model_dir: Path, tmp_path: Path):
    """The bench itself, with simulated shards and one policy."""
    arguments = ["--conversations", "2", "--turns", "2", "--max-tokens", "4", "--think-seconds", "0"]
    policies = ["--engine", "sim", "--shards", "1", "--policies", "ect"]
    env = kvloom_environment(tmp_path)
    done = run_lab(
        "bench",
        "conversations",
        "--model",
        str(model_dir),
        "--json",
        *arguments,
        *policies,
        env=env,
        timeout_seconds=120.0,
    )
    assert done.returncode == 0, done.stderr
    (ect,) = json.loads(done.stdout)
    assert (ect["policy"], ect["requests"]) == ("ect", 4)
    assert ect["cached_share"] >= 0.9
    assert 0 < ect["ttft_p50"] <= ect["ttft_p99"]
