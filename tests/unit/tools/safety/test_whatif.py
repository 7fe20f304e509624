"""`kvloom safety whatif` says what a policy would do with a log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.safety.command import whatif

POLICY = """
[[rules]]
name = "codes"
phrases = ["launch code"]
tenants = {watched = "monitor"}
"""
LOG = [
    {"id": "r1", "prompt": "the launch code"},
    {"id": "r2", "prompt": "hi", "answers": [["the laun", "ch code"], "fine"], "happened": {"cut_at": [4, 2]}},
    {"id": "r3", "tenant": "watched", "prompt": "hi", "answers": ["launch code"], "note": "other fields are allowed"},
    {"id": "r4", "prompt": "harmless", "happened": {"refused": True}},
]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "policy.toml").write_text(POLICY)
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n\n" for line in LOG))
    return ["--policy", str(tmp_path / "policy.toml"), "--log", str(tmp_path / "log.jsonl")]


def test_it_counts_by_rule_and_tenant_and_names_every_difference(files: list[str]) -> None:
    """An operator reads from it what changes for whom before the policy is in force."""
    found = json.loads(CliRunner().invoke(whatif, [*files, "--json"], catch_exceptions=False).output)
    assert (found["requests"], found["answers"]) == (4, 3)
    counts = [(each["rule"], each["tenant"], each["effect"], each["count"]) for each in found["counts"]]
    assert counts == [("codes", "", "refused", 1), ("codes", "", "cut", 1), ("codes", "watched", "flagged", 1)]
    changes = [(each["id"], each["target"], each["was"], each["becomes"]) for each in found["changes"]]
    assert changes == [
        ("r1", "prompt", "allowed", "refused"),
        ("r2", "answer", "cut at 2", "whole"),
        ("r4", "prompt", "refused", "allowed"),
    ]


def test_it_prints_the_same_for_people(files: list[str]) -> None:
    """Of many differences only the first are printed."""
    output = CliRunner().invoke(whatif, files, catch_exceptions=False).output
    assert "4 requests, 3 answers of allowed prompts, 3 differences from what happened" in output
    assert "line 1 r1: prompt was allowed, becomes refused" in output


def test_a_broken_line_is_named(files: list[str], tmp_path: Path) -> None:
    """A log of millions of lines has one that was cut off."""
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"id": "r5", "pro')
    result = CliRunner().invoke(whatif, files)
    assert result.exit_code
    assert "log.jsonl, line 9: " in result.output
