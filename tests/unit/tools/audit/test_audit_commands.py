"""`kvloom audit`, from the log of a safety service to what an operator and a tenant read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvloom.v1.safety_service_pb2 import CheckWish, Classification, ClassifyRequest
from kvloom_common.audit.log import AuditLog, AuditRecord
from safety_svc.audit import Audit
from safety_svc.policy_file import PolicyFile
from safety_svc.server import SafetyServicer
from tools.audit.command import DAY_SECONDS, AbuseRow, abuse_rows
from tools.cli.commands import main

TEXT = "the launch code of eve"


def judge(servicer: SafetyServicer, text: str, tenant: str) -> Classification:
    wanted = ClassifyRequest(texts=[text], check=CheckWish(tenant=tenant))
    return asyncio.run(servicer.Classify(wanted, None)).results[0]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    policy = tmp_path / "policy.toml"
    policy.write_text('[[rules]]\nname = "codes"\nphrases = ["launch code"]\n')
    path = tmp_path / "kvloom.toml"
    path.write_text(f'[safety]\naudit_dir = "{tmp_path / "audit"}"\npolicy_file = "{policy}"\n')
    with contextlib.closing(AuditLog(tmp_path / "audit", "safety")) as log:
        servicer = SafetyServicer(PolicyFile(str(policy)), audit=Audit(log))
        for tenant in ("acme", "rival"):
            for text in (TEXT, "harmless"):
                judge(servicer, text, tenant)
    return path


def run(config: Path, *args: str) -> Result:
    return CliRunner().invoke(main, ["audit", args[0], "--config", str(config), *args[1:]])


def shown(config: Path, *args: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in run(config, "show", *args).output.splitlines()]


def test_what_was_found_is_verified_shown_exported_and_erased(config: Path, tmp_path: Path) -> None:
    """Only what was blocked has a record; erasing one tenant's excerpts leaves the others'."""
    assert "verified 2 records" in run(config, "verify").output
    records = shown(config)
    assert [(each["tenant"], each["rule"], each["excerpt"]) for each in records] == [
        ("acme", "codes", TEXT),
        ("rival", "codes", TEXT),
    ]
    exported = run(config, "export", "--tenant", "acme", "--out", str(tmp_path / "acme.jsonl"))
    assert exported.exit_code == 0, exported.output
    assert json.loads((tmp_path / "acme.jsonl").read_text()) == records[0]
    assert "1 keys" in run(config, "erase", "--tenant", "acme").output
    assert [each.get("excerpt") for each in shown(config, "--tenant", "acme")] == [None, "(erased)"]
    assert shown(config, "--tenant", "rival") == records[1:]
    assert "verified 3 records" in run(config, "verify").output
    assert "rival\t\tcodes\t1\t0.0" in run(config, "abuse").output


def test_a_decision_is_reversed_with_a_reason(config: Path) -> None:
    """The record of it stays, and the reversal names it."""
    blocked = shown(config, "--tenant", "acme")[0]
    assert run(config, "reverse", blocked["hash"][:10], "--reason", "It was a film.").exit_code == 0
    reversal = next(each for each in shown(config) if each["event"] == "reversed")
    assert (reversal["about"], reversal["reason"]) == (blocked["hash"], "It was a film.")
    for name in ("0" * 10, blocked["hash"][:4], reversal["hash"]):
        assert run(config, "reverse", name, "--reason", "x").exit_code != 0


def test_a_rule_in_mode_review_is_decided_about_by_a_person(tmp_path: Path) -> None:
    """What it finds is shown to the client, and listed until it is upheld or reversed. What others note is not."""
    policy, config = tmp_path / "policy.toml", tmp_path / "kvloom.toml"
    policy.write_text(
        '[[rules]]\nname = "doubt"\nphrases = ["launch code"]\nmode = "monitor"\ntenants = {acme = "review"}\n'
    )
    config.write_text(f'[safety]\naudit_dir = "{tmp_path / "audit"}"\npolicy_file = "{policy}"\n')
    with contextlib.closing(AuditLog(tmp_path / "audit", "safety")) as log:
        servicer = SafetyServicer(PolicyFile(str(policy)), audit=Audit(log))
        for tenant in ("acme", "acme", "rival"):
            assert not judge(servicer, TEXT, tenant).HasField("finding")
    first, second = [json.loads(line) for line in run(config, "review").output.splitlines()]
    assert (first["tenant"], first["event"], first["needs_review"]) == ("acme", "flagged", True)
    assert run(config, "uphold", first["hash"], "--reason", "It was meant.").exit_code == 0
    assert run(config, "review").output.strip() == json.dumps(second)
    assert run(config, "reverse", second["hash"], "--reason", "A quote.").exit_code == 0
    assert run(config, "review", "--tenant", "acme").output == ""
    decided = [(each["about"], each["reason"]) for each in shown(config) if each["event"] in ("upheld", "reversed")]
    assert decided == [(first["hash"], "It was meant."), (second["hash"], "A quote.")]


def test_a_changed_log_is_reported(config: Path, tmp_path: Path) -> None:
    """By every command, and by its exit status."""
    [path] = (tmp_path / "audit").glob("*.jsonl")
    path.write_text(path.read_text().replace("acme", "acne"))
    for command in ("verify", "show", "abuse"):
        result = run(config, command)
        assert result.exit_code != 0
        assert "line 2" in str(result.output) + str(result.exception)
    config.write_text("")
    assert run(config, "verify").exit_code != 0


def test_sudden_changes_come_first() -> None:
    """Findings of the last day are compared with the mean of the week before."""
    now = 100 * DAY_SECONDS
    ages = {"calm": [0.5, *range(2, 9)], "sudden": [0.1, 0.2, 0.3], "gone": [1.5], "old": [9.0]}
    records = [
        AuditRecord(1, now - age * DAY_SECONDS, "blocked", "", tenant="t", safety_identifier=user, rule="r")
        for user, days in ages.items()
        for age in days
    ]
    assert abuse_rows(records, now) == [
        AbuseRow("t", "sudden", "r", 3, 0.0),
        AbuseRow("t", "calm", "r", 1, 6 / 7),
        AbuseRow("t", "gone", "r", 0, 1 / 7),
    ]
