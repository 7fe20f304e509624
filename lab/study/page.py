"""Renders the tables of the study in Markdown."""

from __future__ import annotations

from typing import Any

from lab.pages import markdown_table
from lab.study.plan import RIVALS, Row, StudyTable
from lab.study.results import StudyResults
from tools.simulate.statistics import combine


def render(table: StudyTable, results: StudyResults) -> str:
    """The results must have all jobs of the table."""
    if table.kind == "figures":
        return _render_figures(table, results)
    if table.kind == "classes":
        return _render_classes(table, results)
    return _render_capacities(table, results) if table.kind == "capacity" else _render_contest(table, results)


def _render_figures(table: StudyTable, results: StudyResults) -> str:
    heads = ["policy", "hit", "TTFT mean s", "p50", "p90", "p99", "TPOT ms", "goodput", "in flight max/mean"]
    lines: list[list[str]] = []
    for policy in table.policies:
        row = _row(table, table.rows[0], policy, results)
        cells = [
            _share(row, "hit_rate"),
            *(_number(row, field, 3) for field in ("ttft_mean", "ttft_p50", "ttft_p90")),
            _number(row, "ttft_p99", 1),
            _number(row, "tpot_mean", 1, factor=1e3),
            _share(row, "goodput"),
            _number(row, "in_flight_imbalance", 2),
        ]
        lines.append([policy, *cells])
    return markdown_table(heads, lines)


def _render_contest(table: StudyTable, results: StudyResults) -> str:
    """Mean TTFT in seconds / goodput, and a comparison of the default policy with its best rival in either."""
    heads = ["", *table.policies, "TTFT to best rival", "goodput to best rival"]
    lines: list[list[str]] = []
    for row in table.rows:
        found = {policy: _row(table, row, policy, results) for policy in table.policies}
        cells = [f"{_number(one, 'ttft_mean', 3)} / {_share(one, 'goodput')}" for one in found.values()]
        ours = found[table.policies[0]]
        ttfts = [found[rival]["ttft_mean"] for rival in RIVALS if found[rival]["ttft_mean"] is not None]
        difference = "-"
        if ttfts and ours["ttft_mean"] is not None:
            difference = f"{100 * (ours['ttft_mean'] / min(ttfts) - 1):+.1f}%"
        goodput = ours["goodput"] - max(found[rival]["goodput"] for rival in RIVALS)
        lines.append([row.label, *cells, difference, f"{100 * goodput:+.1f} points"])
    return markdown_table(heads, lines)


def _render_classes(table: StudyTable, results: StudyResults) -> str:
    columns = ["TTFT p50 s", "p99", "TPOT ms", "goodput", "good/s"]
    heads = ["rate", "policy", *columns, "batch: TTFT p50 s", "p99", "TPOT ms", "goodput", "good/s", "tokens/s"]
    lines: list[list[str]] = []
    for row in table.rows:
        for policy in table.policies:
            cells: list[str] = []
            for name in ("interactive", "batch"):
                found = [results.find_run(table.job(row, policy, seed)) for seed in table.seeds]
                one = combine(policy, [report.classes[name] for report in found if report is not None])
                cells += [f"{one[field]:.{digits}f}" for field, digits in (("ttft_p50", 2), ("ttft_p99", 1))]
                cells += [f"{1e3 * one['tpot_mean']:.0f}", f"{one['goodput']:.1%}", f"{one['goodput_per_second']:.2f}"]
            lines.append([row.label, policy, *cells, f"{one['output_tokens_per_second']:.0f}"])
    return markdown_table(heads, lines)


def _render_capacities(table: StudyTable, results: StudyResults) -> str:
    heads = ["", *table.policies]
    lines: list[list[str]] = []
    for row in table.rows:
        cells: list[str] = []
        for policy in table.policies:
            report = results.find_capacity(table.capacity_job(row, policy))
            assert report is not None
            cells.append(f"{report.capacity:.4g}")
        lines.append([row.label, *cells])
    return markdown_table(heads, lines)


def _row(table: StudyTable, row: Row, policy: str, results: StudyResults) -> dict[str, Any]:
    reports = [results.find_run(table.job(row, policy, seed)) for seed in table.seeds]
    return combine(policy, [report.statistics for report in reports if report is not None])


def _number(row: dict[str, Any], field: str, digits: int, factor: float = 1.0) -> str:
    if row[field] is None:
        return "-"
    spread = row.get("spread", {}).get(field, 0.0)
    return f"{factor * row[field]:.{digits}f} ±{factor * spread:.{digits}f}"


def _share(row: dict[str, Any], field: str) -> str:
    return f"{_number(row, field, 1, factor=100)}%"
