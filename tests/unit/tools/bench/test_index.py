"""`kvloom bench index` fills a real index and measures every kind of step once."""

from __future__ import annotations

import json

from click.testing import CliRunner

from tools.bench.prefix_index import bench_index
from tools.bench.prefix_index_fill import FilledIndex


def test_the_fleet_holds_what_it_says():
    """Each conversation lies, whole, on its one shard."""
    fleet = FilledIndex(num_shards=3, num_blocks=3200, prompt_blocks=160, seed=1)
    fleet.fill()
    fleet.index.check_integrity()
    assert fleet.index.num_blocks == fleet.num_blocks == 3200
    for number in (0, 7, 19):
        overlaps = fleet.index.count_overlaps(fleet.conversation(number), 0.0)
        assert overlaps == {f"shard-{number % 3}": 160}


def test_the_report_is_whole_and_readable_by_scripts():
    """Every figure of docs/notes/routing/prefix-index.md comes from this object."""
    arguments = ["--shards", "5", "--blocks", "100000", "--prompt-tokens", "512", "--snapshot-blocks", "9000"]
    result = CliRunner().invoke(bench_index, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert (report["num_shards"], report["num_blocks"], report["prompt_blocks"]) == (5, 100_000, 32)
    # Growth of the process: memory that earlier tests have freed may hide so small an index.
    assert set(report["memory"]) == {"bytes_per_block", "gib"}
    assert len(report["look_up"]) == 8
    assert all(row["p99_us"] >= row["p50_us"] > 0 for row in [*report["look_up"], *report["place"], *report["update"]])
    assert report["snapshot"][0]["snapshot_total_ms"] >= report["snapshot"][0]["snapshot_at_once_ms"] > 0
    assert CliRunner().invoke(bench_index, ["--prompt-tokens", "131072", "--blocks", "100000"]).exit_code == 2
