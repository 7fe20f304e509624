"""Workloads in which memory and decoding decide, and comparisons of versions draw by draw."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from lab.study.pairs import compare_differences, compare_ratios
from lab.study.regimes import REGIMES, write_trace
from lab.study.regimes_command import DrawResult, regimes_command
from tools.simulate.traces import read_trace

SMALL = ("zipf-prompts-32", "--share", "0.02", "--jobs", "1")


def run(results: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(regimes_command, [*SMALL, "--results", str(results), *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_a_regime_is_what_it_says(tmp_path: Path):
    """Rate, prefixes and lengths are those of its classes, and a shorter draw is the beginning of the whole one."""
    name = "reasoning-and-documents-8"
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    write_trace(whole, name, 5)
    write_trace(part, name, 5, 0.5)
    calls = read_trace(whole, "mooncake").calls
    reasoning, documents = REGIMES[name].classes
    of_documents = [call for call in calls if call.num_prompt_tokens > documents.prefix_tokens // 512 * 512]
    seconds = REGIMES[name].seconds
    assert len(of_documents) == pytest.approx(documents.per_second * seconds, rel=0.3)
    assert len(calls) - len(of_documents) == pytest.approx(reasoning.per_second * seconds, rel=0.1)
    assert len({call.block_hashes[0] for call in of_documents}) == documents.num_prefixes
    first = [call.num_output_tokens for call in read_trace(part, "mooncake").calls]
    assert 0.4 * len(calls) < len(first) < 0.6 * len(calls)


def test_pairs_cancel_what_draws_differ_by():
    """Every draw is 5% faster, however much the draws differ: the interval is narrow, and one pair proves nothing."""
    before = {seed: 0.3 + 0.1 * seed for seed in range(8)}
    after = {seed: value * (0.95 + 0.001 * (seed % 2)) for seed, value in before.items()}
    ratio = compare_ratios(after, before)
    assert math.exp(ratio.mean) == pytest.approx(0.9505, abs=1e-4)
    assert ratio.half_width < 0.001
    assert compare_differences({1: 0.5}, {1: 0.4, 2: 0.3}).half_width == math.inf
    # Student's 2.365 at 7 degrees: the values -3.5 ... 3.5 have the deviation sqrt(6).
    difference = compare_differences({seed: seed - 3.5 for seed in range(8)}, dict.fromkeys(range(8), 0.0))
    assert difference.half_width == pytest.approx(2.365 * math.sqrt(6 / 8), rel=1e-3)
    with pytest.raises(ValueError, match="no draw"):
        compare_ratios({1: 1.0}, {2: 1.0})


def test_versions_are_compared_on_the_same_draws(tmp_path: Path):
    """What is done already is not done again, and a version differs from itself by nothing."""
    results = tmp_path / "results.jsonl"
    shown = run(results, "--label", "before", "--seeds", "1-2", "--policy", "ect,dynamo_w16,pool")
    assert "TTFT / pool" in shown.output
    kept = results.read_bytes()
    found = [msgspec.json.decode(line, type=DrawResult) for line in kept.splitlines()]
    assert len(found) == 6
    run(results, "--label", "before", "--seeds", "1-2", "--policy", "ect,dynamo_w16,pool")
    assert results.read_bytes() == kept
    again = run(results, "--label", "after", "--seeds", "1-2", "--against", "before")
    assert "| 2 |" in again.output
    assert "1.000 (1.00 to 1.00)" in again.output


@pytest.mark.parametrize("arguments", [("nothing",), ("zipf-prompts-32", "--seeds", "x")])
def test_what_does_not_exist_is_refused(tmp_path: Path, arguments: tuple[str, ...]):
    """Before anything is simulated, and with the name of the flag or workload."""
    result = CliRunner().invoke(regimes_command, [*arguments, "--results", str(tmp_path / "r")])
    assert result.exit_code == 1
    assert arguments[-1] in str(result.output) + str(result.exception)
