"""`kvloom-lab bench index` fills a real index and measures every kind of step once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from lab.bench.prefix_index import bench_index, run_bench
from lab.bench.prefix_index_fill import FilledIndex


def test_the_fleet_holds_what_it_says():
    """Each conversation lies, whole, on its one shard."""
    fleet = FilledIndex(num_shards=3, num_blocks=3200, prompt_blocks=160, seed=1)
    fleet.fill()
    fleet.index.check_integrity()
    assert fleet.index.num_blocks == fleet.num_blocks == 3200
    for number in (0, 7, 19):
        overlaps = fleet.index.count_overlaps(fleet.conversation(number), 0.0)
        assert overlaps == {f"shard-{number % 3}": 160}


def check_report(report: dict[str, Any]) -> None:
    # Growth of the process: memory that earlier tests have freed may hide so small an index.
    assert set(report["memory"]) == {"bytes_per_block", "gib"}
    assert len(report["look_up"]) == 8
    assert all(row["p99_us"] >= row["p50_us"] > 0 for row in [*report["look_up"], *report["place"], *report["update"]])
    assert report["snapshot"][0]["snapshot_total_ms"] >= report["snapshot"][0]["snapshot_at_once_ms"] > 0
    assert report["restart"]["blocks"] == report["num_blocks"]


def test_the_report_is_whole():
    """Every figure of docs/notes/routing/prefix-index.md comes from this object."""
    report = run_bench(5, 3200, [900], num_prompt_tokens=512, block_size=16)
    assert (report["num_shards"], report["num_blocks"], report["prompt_blocks"]) == (5, 3200, 32)
    check_report(report)


@pytest.mark.long
def test_the_command_prints_the_report_for_scripts():
    """The smallest index that the command takes has a hundred thousand blocks."""
    arguments = ["--shards", "5", "--blocks", "100000", "--prompt-tokens", "512", "--snapshot-blocks", "9000"]
    result = CliRunner().invoke(bench_index, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert (report["num_shards"], report["num_blocks"], report["prompt_blocks"]) == (5, 100_000, 32)
    check_report(report)


def test_a_prompt_that_is_too_long_for_the_index_is_refused():
    """The conversations would be so few that the index is not like one of a fleet."""
    assert CliRunner().invoke(bench_index, ["--prompt-tokens", "131072", "--blocks", "100000"]).exit_code == 2
