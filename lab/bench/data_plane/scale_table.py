"""The table of `kvloom-lab bench data-plane --scale-out`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.bench.data_plane.run import OURS
from lab.pages import conditions, markdown_table

Report = Mapping[str, Any]


def scale_table(reports: Sequence[Report], command: str) -> str:
    """Render Markdown: one table per workload and one for the idle fabric, with one row per layout."""
    num_runs = max((w["num_runs"] for report in reports for w in report["workloads"]), default=0)
    lines = [
        conditions(command, num_runs)
        + "; a fresh fabric for each layout and run. Layouts are edges x routers x shards. "
        "CPU of all processes of a role, all threads; cores: what fabric, engines and client used together."
    ]
    for position, workload in enumerate(reports[0]["workloads"]):
        measured = [(report["layout"], report["workloads"][position]) for report in reports]
        lines += ["", f"{workload['workload']}, {workload['about']}:", "", _workload_table(measured)]
    lines += ["", "Idle, and memory behind the load:", "", _standing_table(reports)]
    return "\n".join(lines)


def _workload_table(measured: Sequence[tuple[str, Report]]) -> str:
    num_tokens = max(1, round(measured[0][1]["tokens_per_second"] / (measured[0][1]["requests_per_second"] or 1)))
    unit, field, digits = ("request", "cpu_us_per_request", 0) if num_tokens == 1 else ("token", "cpu_us_per_token", 1)
    heads = ("layout", f"µs/{unit}", *OURS, f"{unit}s/s", "added TTFT p50 / p99 ms", "cores", "errors")
    rows: list[tuple[str, ...]] = []
    for name, report in measured:
        cpu_us, spread = report[field], report["spread"][field]
        ttft = " / ".join("–" if value is None else f"{value:.1f}" for value in report["added_ttft_ms"].values())
        rows.append(
            (
                name,
                f"{cpu_us['sum']:,.{digits}f} ±{spread['sum'] / 2:,.{digits}f}",
                *(f"{cpu_us[role]:,.{digits}f}" if role in cpu_us else "–" for role in OURS),
                f"{report[f'{unit}s_per_second']:,.0f}",
                ttft,
                f"{report['busy_cores']:.2f}",
                f"{report['num_errors']:,}",
            )
        )
    return markdown_table(heads, rows)


def _standing_table(reports: Sequence[Report]) -> str:
    heads = ("layout", "router, CPU µs/s", "edge", "redis", "shards", "a router's MB", "ready after s")
    rows: list[tuple[str, ...]] = []
    for report in reports:
        standing = report["standing"]
        idle = standing["cpu_us_per_second"]
        rows.append(
            (
                report["layout"],
                *(f"{idle.get(role, 0.0):,.0f}" for role in ("router", "edge", "redis", "shard")),
                f"{standing['rss_mb'].get('router', 0.0):,.0f}",
                f"{standing['ready_seconds']:.1f}",
            )
        )
    return markdown_table(heads, rows)
