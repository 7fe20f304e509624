"""`kvloom whatif`: what limits, prices and a fleet would have done to the tenants of a decision file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from router.decisions.records import FleetLine, RequestLine
from tests.fakes.decision_lines import BEGAN_AT, fleet, request, write
from tools.whatif.command import whatif

NUM_REQUESTS = 40
SECONDS = 0.1 * NUM_REQUESTS
"""The time in which they arrive."""
PRICE = {"model": "m", "prompt_nanos": 1000, "output_nanos": 50_000}


def of_tenants(**fields: Any) -> list[RequestLine]:
    """Half of them of acme/web and half of zeta/web."""
    names = ("acme/web", "zeta/web")
    return [
        request(index, tenant=names[index % 2], key=names[index % 2][:4], max_tokens=20, **fields)
        for index in range(NUM_REQUESTS)
    ]


def refused(index: int, error: str = "rate_limited") -> RequestLine:
    outcome: dict[str, Any] = {
        "reason": "error",
        "error": error,
        "shard_id": "",
        "num_attempts": 0,
        "num_cached_tokens": 0,
        "num_output_tokens": 0,
        "ttft_seconds": None,
        "e2e_latency_seconds": 0.0,
    }
    return request(index, outcome=outcome, block_size=0, block_hashes=b"", attempts=[], tenant="acme/web", session="")


def invoke(tmp_path: Path, lines: Sequence[FleetLine | RequestLine], *flags: str, **files: Any) -> Result:
    """`files` are given with the flags of their names."""
    path = write(tmp_path / "decisions.jsonl", lines)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        flags = (*flags, f"--{name}", str(tmp_path / f"{name}.json"))
    return CliRunner().invoke(whatif, ["--decisions", str(path), *flags])


def rows(tmp_path: Path, lines: Sequence[FleetLine | RequestLine], *flags: str, **files: Any) -> dict[str, Any]:
    result = invoke(tmp_path, lines, "--json", *flags, **files)
    assert result.exit_code == 0, result.output
    return {row["tenant"]: row for row in json.loads(result.stdout)}


def test_without_a_change_the_same_answers_are_billed(tmp_path: Path) -> None:
    """What is predicted differs by the error of the model alone: the same requests have the same answers, and those
    whose cached tokens cost nothing less the same bill, which is that of the price list."""
    found = rows(tmp_path, [fleet(), *of_tenants()], price=[PRICE])
    assert list(found) == ["acme/web", "zeta/web", "*"]
    for row in found.values():
        assert row["predicted"]["refused"] == row["predicted"]["failed"] == row["recorded"]["refused"] == 0
        assert row["predicted"]["cost_nanos"] == row["recorded"]["cost_nanos"]
        assert row["predicted"]["ttft_p50"] > 0
    own = [line for line in of_tenants() if line.tenant == "acme/web"]
    cost = sum(1000 * line.num_prompt_tokens + 50_000 * line.outcome.num_output_tokens for line in own)
    assert found["acme/web"]["recorded"]["cost_nanos"] == cost
    assert found["*"]["recorded"]["requests"] == NUM_REQUESTS


@pytest.mark.parametrize("account", ["tenant:acme/web", "org:acme", "key:acme"])
def test_a_limit_per_minute_refuses_what_its_bucket_does_not_hold(tmp_path: Path, account: str) -> None:
    """The 429s are those of a full bucket that fills up evenly, which can be counted by hand; others have none."""
    found = rows(tmp_path, [fleet(), *of_tenants()], limits={account: {"requests_per_minute": 6}})
    num_admitted = 6 + int(SECONDS * 6 / 60)
    assert found["acme/web"]["predicted"]["refused"] == pytest.approx(NUM_REQUESTS // 2 - num_admitted, abs=1)
    assert found["zeta/web"]["predicted"]["refused"] == 0
    assert found["acme/web"]["recorded"]["refused"] == 0


def test_a_budget_is_not_exceeded(tmp_path: Path) -> None:
    """Budgets are hard: the predicted bill stays below, and what does not fit is refused."""
    limits = {"tenant:acme/web": {"monthly_budget_nanos": 3_000_000}}
    found = rows(tmp_path, [fleet(), *of_tenants()], limits=limits, price=[PRICE])["acme/web"]
    assert 0 < found["predicted"]["cost_nanos"] <= 3_000_000 < found["recorded"]["cost_nanos"]
    assert found["predicted"]["refused"] > 0


def test_short_answers_are_billed_as_such(tmp_path: Path) -> None:
    """A limit on the length of answers lowers the bill, and refuses nothing."""
    limits = {"tenant:acme/web": {"max_output_tokens": 2}}
    found = rows(tmp_path, [fleet(), *of_tenants()], limits=limits)
    assert found["acme/web"]["predicted"]["num_output_tokens"] == NUM_REQUESTS // 2 * 2
    assert found["zeta/web"]["predicted"]["num_output_tokens"] == NUM_REQUESTS // 2 * 5


def test_what_was_refused_is_served_under_wider_limits(tmp_path: Path) -> None:
    """Demand that a limit has turned away is in the file, so that more can be predicted than less. Unless limits
    change, it is refused again; what no limit could help is never served."""
    lines = [*of_tenants(), refused(40), refused(41, "budget_exhausted"), refused(42, "model_not_found")]
    as_it_was = rows(tmp_path, [fleet(), *lines])["acme/web"]
    assert as_it_was["recorded"]["refused"] == as_it_was["predicted"]["refused"] == 2
    wider = rows(tmp_path, [fleet(), *lines], limits={"tenant:acme/web": {"requests_per_minute": 600}})["acme/web"]
    assert (wider["predicted"]["refused"], wider["predicted"]["failed"]) == (0, 1)
    assert wider["predicted"]["num_output_tokens"] == wider["recorded"]["num_output_tokens"] + 2 * 5


def test_overload_is_served_by_a_larger_fleet(tmp_path: Path) -> None:
    """What was refused because the fleet was full arrives again whatever changes."""
    lines = [*of_tenants(), refused(40, "queue_full")]
    found = rows(tmp_path, [fleet(), *lines], "--shards", "4")["acme/web"]
    assert (found["recorded"]["refused"], found["predicted"]["refused"]) == (1, 0)


def test_a_later_price_is_that_of_the_prediction(tmp_path: Path) -> None:
    """What is recorded was billed with the price of its day."""
    later = {**PRICE, "effective_from": BEGAN_AT + 1e6, "output_nanos": 100_000}
    found = rows(tmp_path, [fleet(), *of_tenants()], price=[PRICE, later])["*"]
    grown = 50_000 * found["recorded"]["num_output_tokens"]
    assert found["predicted"]["cost_nanos"] == found["recorded"]["cost_nanos"] + grown


def test_more_load_on_fewer_shards_waits_longer(tmp_path: Path) -> None:
    """The fleet and the rate can be changed, too."""
    slow = rows(tmp_path, [fleet(), *of_tenants()], "--shards", "1", "--rate", "20")["*"]["predicted"]
    fast = rows(tmp_path, [fleet(), *of_tenants()])["*"]["predicted"]
    assert slow["ttft_p99"] > 2 * fast["ttft_p99"]


def test_the_table_has_both_rows_of_each_tenant(tmp_path: Path) -> None:
    """For people, what was recorded is above what is predicted."""
    result = invoke(tmp_path, [fleet(), *of_tenants()], "--policy", "round_robin")
    firsts = [line.split("  ")[0].strip() for line in result.stdout.splitlines()]
    assert [first for first in firsts if first] == ["tenant", "acme/web", "zeta/web", "*"]
    assert result.stdout.count("  predicted") == 3


@pytest.mark.parametrize(
    ("flags", "files", "message"),
    [
        ((), {"limits": {"team:x": {}}}, "'team:x' is none of org:ORG"),
        ((), {"limits": {"org:x": {"requests": 1}}}, "There is no field 'org:x.requests'"),
        ((), {"limits": [1]}, "an object with accounts is expected"),
        ((), {"price": [{"model": "m", "prompt_nanos": "1"}]}, "prices[0].prompt_nanos must be an integer"),
        (("--policy", "none"), {}, "--policy none:"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, flags: Sequence[str], files: dict[str, Any], message: str) -> None:
    """A file with limits is written by hand."""
    result = invoke(tmp_path, [fleet(), request(0)], *flags, **files)
    assert result.exit_code == 1
    assert message in " ".join(str(result.exception or result.output).split()) + result.output
