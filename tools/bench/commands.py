"""`kvloom bench`: the commands by name."""

from __future__ import annotations

import click

from tools.cli.lazy_group import LazyGroup


@click.group(
    cls=LazyGroup,
    commands_at={
        "brownout": "tools.bench.brownout:bench_brownout",
        "engine": "tools.bench.engine.command:bench_engine",
        "index": "tools.bench.prefix_index:bench_index",
        "kv-shares": "tools.bench.kv_shares:bench_kv_shares",
        "conversations": "tools.bench.conversations_command:bench_conversations",
        "data-plane": "tools.bench.data_plane.command:bench_data_plane",
        "directory": "tools.bench.directory:bench_directory",
        "memory": "tools.bench.memory:bench_memory",
        "fair-queue": "tools.bench.fair_queue:bench_fair_queue",
        "fairness": "tools.bench.fairness:bench_fairness",
        "overload": "tools.bench.overload:bench_overload",
        "preemption": "tools.bench.preemption:bench_preemption",
        "spot-notice": "tools.bench.spot_notice:bench_spot_notice",
        "tenant-timing": "tools.bench.tenant_timing:bench_tenant_timing",
        "tenants": "tools.bench.tenants.command:bench_tenants",
        "routing": "tools.simulate.study.command:study_command",
    },
)
def bench() -> None:
    """Measure engines, routing and the data plane."""
