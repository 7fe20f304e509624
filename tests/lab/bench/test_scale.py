"""The grid of `kvloom-lab bench data-plane --scale-out`, and what is shown of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvloom_common.config import KvloomConfig, ModelConfig
from lab.bench.data_plane.run import BenchPlan, figures_of, report_of
from lab.bench.data_plane.scale import GRID, Standing, parse_layout
from lab.bench.data_plane.scale_table import scale_table
from lab.bench.data_plane.workloads import WORKLOADS
from tools.supervisor.process_specs import plan_stages


def shard_processes(num_shards: int, shards_per_process: int) -> list[tuple[str, ...]]:
    """Their arguments behind the configuration file's."""
    config = KvloomConfig()
    config.redis.url = "redis://127.0.0.1:1/0"
    config.shard.engine = "sim"
    config.shard.num_shards, config.shard.sim.shards_per_process = num_shards, shards_per_process
    [services] = plan_stages(config, config_path=Path("kvloom.json"), embed_redis=False, start_timeout_seconds=1.0)
    return [spec.argv[3:] for spec in services if spec.role == "shard"]


def test_few_shards_are_processes_and_many_share_one() -> None:
    """What a process of its own costs is part of a small fleet; a large one must fit the machine."""
    layouts = {name: parse_layout(name) for name in GRID}
    for name, layout in layouts.items():
        assert name == f"{layout.num_edges}x{layout.num_routers}x{layout.num_shards}"
        assert layout.shards_per_process == (1 if layout.num_shards <= 4 else layout.num_shards)


@pytest.mark.parametrize("text", ["", "1x1", "0x1x1", "1x1x0", "1x1x1x1", "-1x1x1", "axbxc"])
def test_a_layout_that_is_none_is_refused(text: str) -> None:
    """A mistyped layout must not become a fabric of nothing."""
    with pytest.raises(ValueError, match="EDGESxROUTERSxSHARDS"):
        parse_layout(text)


def test_every_shard_is_in_exactly_one_process() -> None:
    """Names are numbered through: a router that saw one twice would connect to one of them only."""
    own = shard_processes(3, 1)
    assert [argv[0] for argv in own] == ["shard_server"] * 3
    shared = shard_processes(10, 4)
    assert [(argv[0], *argv[-4:]) for argv in shared] == [
        ("tools.many_shards", "--first", "0", "--count", "4"),
        ("tools.many_shards", "--first", "4", "--count", "4"),
        ("tools.many_shards", "--first", "8", "--count", "2"),
    ]


def test_the_table_has_tokens_where_answers_are_long_and_requests_where_they_are_short() -> None:
    """A reader compares lines: each has its layout, its costs by process, and its errors."""
    plan = BenchPlan(model=ModelConfig(), workloads=[WORKLOADS["W1"], WORKLOADS["W3"]], num_runs=1)
    standing = Standing(3.0, {"router": 1700.0, "edge": 900.0}, {"router": 101.5})
    reports = [
        {
            "layout": name,
            "standing": {
                "ready_seconds": standing.ready_seconds,
                "cpu_us_per_second": standing.cpu_us_per_second,
                "rss_mb": standing.rss_mb,
            },
            "workloads": [report_of(w, [figures_of(w, raw(w.num_tokens))], plan) for w in plan.workloads],
        }
        for name in ("1x1x1", "1x1x256")
    ]
    table = scale_table(reports, "kvloom bench")
    assert (
        "| layout | µs/token | edge | router | safety | tokens/s | added TTFT p50 / p99 ms | cores | errors |" in table
    )
    assert "| 1x1x256 | 0.3 ±0.0 | 0.1 | 0.2 | – | 2,560 | 2.0 / 3.0 | 0.00 | 1 |" in table
    assert "| layout | µs/request | edge |" in table
    assert "| 1x1x1 | 70 ±0 | 20 | 50 | – | 10 | 2.0 / 3.0 | 0.00 | 1 |" in table
    assert "| 1x1x256 | 1,700 | 900 | 0 | 0 | 102 | 3.0 |" in table


def raw(num_tokens: int) -> dict[str, Any]:
    """What the load client says of ten requests in a second."""
    return {
        "num_complete": 10,
        "num_errors": 1,
        "errors": {},
        "cpu_us": {"edge": 200.0, "router": 500.0},
        "switches": {},
        "rss_bytes": {},
        "first_token_seconds": [0.002, 0.002, 0.003],
        "transit_seconds": [],
        "wall_seconds": 1.0,
        "num_events": num_tokens,
        "num_reads": 1,
        "client_cpu_us": 100.0,
    }
