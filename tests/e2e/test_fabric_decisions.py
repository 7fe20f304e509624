"""From a running fabric's decision log to `kvloom simulate --decisions`: the same requests, other policies."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fabric import RunningFabric, eventually, run_kvloom

NUM_CONVERSATIONS = 12
NUM_TURNS = 3
NUM_TOKENS = 4
NUM_SHARDS = 2
"""The number of the fabric's shards."""
pytestmark = pytest.mark.xdist_group("sim")


@pytest.fixture(scope="module")
def decisions(sim_fabric: RunningFabric, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """(what a fabric has logged of conversations, the usage of each answer)."""
    log = Path(sim_fabric.env["KVLOOM_DATA_DIR"]).parent / "decisions.jsonl"
    with ThreadPoolExecutor(NUM_SHARDS) as pool:  # no more, or the time that a busy machine takes decides where they go
        conversations = list(pool.map(lambda index: converse(sim_fabric, index), range(NUM_CONVERSATIONS)))
    answers = [answer for conversation in conversations for answer in conversation]
    ids = {answer["id"] for answer in answers}

    def own_lines() -> list[str]:
        """Of the fleet, and of these answers: other tests' requests are in the log as well."""
        return [line for line in log.read_text().splitlines() if json.loads(line).get("request_id") in {None, *ids}]

    eventually("all are logged", lambda: sum('"request_id"' in line for line in own_lines()) == len(ids))
    path = tmp_path_factory.mktemp("decisions") / "decisions.jsonl"
    path.write_text("".join(f"{line}\n" for line in own_lines()))
    return path, [answer["usage"] for answer in answers]


def converse(fabric: RunningFabric, index: int) -> list[dict[str, Any]]:
    """The answers of a conversation. Each turn begins with all that was said before."""
    text = f"Conversation {index}. " + "What was said first stays the same. " * 12
    answers: list[dict[str, Any]] = []
    for turn in range(NUM_TURNS):
        body = {
            "model": "smollm2-135m-instruct",
            "max_tokens": NUM_TOKENS,
            "messages": [{"role": "user", "content": text}],
        }
        request = urllib.request.Request(
            f"{fabric.http_url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            answers.append(json.load(answer))
        text += f"And then, as number {turn}, came this. " * 8
    return answers


def simulate(decisions: Path, *args: str) -> str:
    env = {"KVLOOM_SIMULATE_JOBS": "1"}
    done = run_kvloom("simulate", "--decisions", str(decisions), *args, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_recorded_row_is_what_clients_were_told(decisions: tuple[Path, list[dict[str, Any]]]):
    """The log's hit rate is that of the answers' usage, and the replay of the policy in force comes close to it."""
    path, usages = decisions
    rows = json.loads(simulate(path, "--policy", "all", "--json"))
    by_policy = {row["policy"]: row for row in rows}
    assert (rows[0]["policy"], rows[-1]["policy"]) == ("recorded", "bound")
    assert [row["policy"] for row in rows if row["in_force"]] == [rows[1]["policy"]] == ["ect"]
    cached = sum((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) for usage in usages)
    told = cached / sum(usage["prompt_tokens"] for usage in usages)
    assert told > 0.2, "conversations share prefixes"
    assert rows[0]["hit_rate"] == pytest.approx(told)
    assert by_policy["ect"]["hit_rate"] == pytest.approx(told, abs=0.1)
    num_behind_warm_up = len(usages) - len(usages) // 10
    assert {row["requests"] for row in rows} == {num_behind_warm_up}
    for row in rows:
        assert row["failed"] == 0
        assert 0 < row["ttft_p50"] <= row["ttft_p90"] <= row["ttft_p99"]


def test_the_table_names_what_was_and_what_would_have_been(decisions: tuple[Path, list[dict[str, Any]]]):
    """The command as it is in the documentation, and as a what-if with another fleet."""
    path, _ = decisions
    table, _, calibration = simulate(path, "--policy", "round_robin").partition("predictions against what happened")
    title, _, *rows = table.splitlines()
    assert title.strip() == "decisions.jsonl, 2 × recorded, rate ×1"
    assert "recorded" in calibration
    assert [row.split("  ")[0] for row in rows if row.strip()] == [
        "recorded",
        "ect (in force)",
        "round_robin",
        "pool",
        "bound",
    ]
    assert "3 × recorded, rate ×2" in simulate(path, "--shards", "3", "--rate", "2")
