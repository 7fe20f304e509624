"""`kvloom explain` against a running fabric: what it prints, its JSON, and how it fails."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fabric import RunningFabric, run_kvloom

pytestmark = pytest.mark.xdist_group("sim")

MODEL = "smollm2-135m-instruct"
QUESTION = "Which way did my request go, and why? " * 8
SHARD_FIELDS = {
    "shard_id",
    "num_overlap_tokens",
    "num_running",
    "num_waiting",
    "num_queued_prefill_tokens",
    "predicted_ttft_seconds",
    "cost_seconds",
    "cost_terms",
    "filtered_reason",
}


def chat(fabric: RunningFabric, **fields: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """(body, headers) of an answer over HTTP that was asked to explain itself."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3, **fields}
    headers = {"Content-Type": "application/json", "x-kvloom-explain": "1"}
    request = urllib.request.Request(f"{fabric.http_url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer), dict(answer.headers.items())


def explain(fabric: RunningFabric, *args: str) -> str:
    done = run_kvloom("explain", *args, env=fabric.env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plan_is_shown_shard_by_shard(sim_fabric: RunningFabric):
    """The question before a request is sent: where would it go, and what does each part of the cost say?"""
    plan = json.loads(explain(sim_fabric, "--prompt", QUESTION, "--json"))
    assert {"num_prompt_tokens", "shards", "picked_shard_id", "regret"} <= plan.keys()
    assert {shard["shard_id"] for shard in plan["shards"]} == {"shard-0", "shard-1"}
    for shard in plan["shards"]:
        assert shard.keys() == SHARD_FIELDS
        assert shard["cost_seconds"] == pytest.approx(sum(shard["cost_terms"].values()))
    assert plan["picked_shard_id"] == plan["shards"][0]["shard_id"]
    table = explain(sim_fabric, "--prompt", QUESTION)
    header, *rows, regret, deviation = table.splitlines()
    assert all(term in header for term in plan["shards"][0]["cost_terms"]), "each term has its column, none is cut off"
    assert ["← picked" in row for row in rows] == [True, False]
    assert all(f"of {plan['num_prompt_tokens']}" in row for row in rows)
    assert regret.startswith("regret: ")
    assert plan["prefill_deviation_seconds"] > 0
    assert deviation == f"its prefill time is known to ± {1000 * plan['prefill_deviation_seconds']:.1f} ms"


def test_a_request_is_explained_with_its_outcome(sim_fabric: RunningFabric):
    """From the answer of any OpenAI client to its placement: the id leads there, the headers agree."""
    chat(sim_fabric)
    body, headers = chat(sim_fabric)
    explained = json.loads(explain(sim_fabric, "--request-id", body["id"], "--json"))
    assert explained.keys() == {
        "request_id",
        "client_request_id",
        "other_request_ids",
        "decisions",
        "outcome",
        "brownout",
        "priority_class",
        "rank",
        "tenant",
        "fairness_id",
    }
    assert (explained["brownout"], explained["priority_class"], explained["rank"]) == ("", "interactive", 1)
    plan = explained["decisions"][0]["plan"]
    outcome = explained["outcome"]
    assert headers["x-kvloom-shard"] == plan["picked_shard_id"] == outcome["shard_id"]
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0, "the same prompt was just there"
    assert int(headers["x-kvloom-cached-tokens"]) == cached == outcome["num_cached_tokens"]
    assert outcome["reason"] == "FINISH_REASON_LENGTH"
    error = outcome["ttft_seconds"] - outcome["predicted_ttft_seconds"]
    assert outcome["ttft_error_seconds"] == pytest.approx(error)
    shown = explain(sim_fabric, "--request-id", body["id"])
    for piece in (
        body["id"],
        "attempt 1",
        "← picked",
        "regret: ",
        "class interactive, rank 1",
        "ended: finished, length on ",
        f"{cached} of ",
        "predicted ",
    ):
        assert piece in shown


def test_tokens_can_be_asked_about(sim_fabric: RunningFabric, tmp_path: Path):
    """Who has tokens, e.g. from a trace, needs no text; both ways to write them down say the same."""
    plans = []
    for name, content in (("a", "[1, 2, 3]"), ("b", "1 2\n3\n")):
        (tmp_path / name).write_text(content)
        plans.append(json.loads(explain(sim_fabric, "--tokens", str(tmp_path / name), "--json", "--model", MODEL)))
    assert [plan["num_prompt_tokens"] for plan in plans] == [3, 3]
    raw = json.loads(explain(sim_fabric, "--prompt", QUESTION, "--raw", "--json"))
    rendered = json.loads(explain(sim_fabric, "--prompt", QUESTION, "--json"))
    assert 0 < raw["num_prompt_tokens"] < rendered["num_prompt_tokens"]


def test_what_cannot_be_placed_says_why(sim_fabric: RunningFabric):
    """No shard takes it: the reason is the explanation."""
    shown = explain(sim_fabric, "--prompt", QUESTION, "--max-tokens", "1000000")
    assert "not placed: " in shown
    assert "← picked" not in shown


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        ((), 2, "give one of --prompt, --tokens and --request-id"),
        (("--prompt", "x", "--request-id", "y"), 2, "give one of"),
        (("--request-id", "never-seen"), 1, "placement of a request 'never-seen'"),
        (("--prompt", "x", "--model", "gpt-17"), 1, "'gpt-17' does not exist"),
        (("--prompt", "", "--raw"), 1, "text must not be empty"),
        (("--prompt", "x", "--router-address", "127.0.0.1:1"), 1, "no router answers at 127.0.0.1:1"),
        (("--tokens", "/dev/null"), 1, "holds no token ids"),
    ],
)
def test_a_question_that_cannot_be_answered_fails_in_one_line(sim_fabric: RunningFabric, args, status: int, message):
    """The reason, and no stack trace."""
    done = run_kvloom("explain", *args, env=sim_fabric.env)
    assert done.returncode == status, done.stdout + done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_a_fabric_it_says_so(tmp_path: Path, sim_fabric: RunningFabric):
    """Scripts tell this apart by the status, as for the other commands."""
    done = run_kvloom("explain", "--prompt", "x", "--data-dir", str(tmp_path), env=sim_fabric.env)
    assert done.returncode == 3
    assert "kvloom is not running" in done.stderr
