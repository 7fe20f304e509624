"""The table of `kvloom-lab bench data-plane --peers`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lab.bench.data_plane.peer_comparison import PEERS
from lab.pages import conditions, markdown_table

_CPU_PER_TOKEN: Final = ("W1", "W1x512", "W2")
_CPU_PER_REQUEST: Final = ("W3", "W4")
_TRANSIT: Final = ("W1", "W1+W4")
_NUM_SHOWN_ERRORS: Final = 2


def peers_table(reports: Sequence[Mapping[str, Any]], missing: Mapping[str, str], command: str) -> str:
    """Render Markdown with one row per system: medians, ± half the spread."""
    by_system: dict[str, dict[str, Mapping[str, Any]]] = {}
    for report in reports:
        by_system.setdefault(report["system"], {})[report["workload"]] = report
    workloads = list(dict.fromkeys(report["workload"] for report in reports))
    columns = [column for workload in workloads for column in _columns(workload)]
    rows: list[list[str]] = []
    for system, own in by_system.items():
        cells = [show(own) for _, show in columns]
        num_errors = sum(report["num_errors"] for report in own.values())
        version = next(iter(own.values()))["version"]
        rows.append([_label(system, version), *cells, f"{num_errors:,}"])
    table = markdown_table(["system", *(title for title, _ in columns), "errors"], rows)
    lines = [_conditions(reports, command), "", table]
    lines += [
        f"\n{report['system']}, {report['workload']}: {_errors(report)}." for report in reports if _errors(report)
    ]
    lines += [f"\n{name}: not measured. {reason}" for name, reason in missing.items()]
    return "\n".join(lines)


def _columns(workload: str) -> list[tuple[str, Any]]:
    """Return (title, function that formats the cell from a system's reports by workload) for each column."""

    def figure(field: str, key: str | None, digits: int, *, with_spread: bool = True) -> Any:
        def show(own: Mapping[str, Mapping[str, Any]]) -> str:
            report = own.get(workload)
            value = None if report is None else report[field] if key is None else report[field].get(key)
            if report is None or value is None:
                return "–"
            if not with_spread:
                return f"{value:,.{digits}f}"
            spread = report["spread"][field] if key is None else report["spread"][field][key]
            return f"{value:,.{digits}f} ±{spread / 2:,.{digits}f}"

        return show

    found: list[tuple[str, Any]] = []
    if workload in _CPU_PER_TOKEN:
        found.append((f"{workload} µs/token", figure("cpu_us_per_token", "sum", 1)))
    if workload in _CPU_PER_REQUEST:
        found.append((f"{workload} µs/request", figure("cpu_us_per_request", "sum", 0)))
    if workload == "W1":
        found.append(("W1 added TTFT p50 ms", figure("added_ttft_ms", "p50", 2, with_spread=False)))
        found.append(("W1 p99", figure("added_ttft_ms", "p99", 1, with_spread=False)))
    if workload in _TRANSIT:
        found.append((f"{workload} transit p99 ms", figure("transit_ms", "p99", 1)))
    if workload == "W5":  # the highest of several runs: later runs reuse memory that the first has left
        found.append(("W5 kB/stream", figure("rss_kb_per_stream", None, 1, with_spread=False)))
    return found


def _label(system: str, version: str) -> str:
    peer = PEERS.get(system)
    return f"**{system}** {version}" if peer is None else f"{system} {version} ({peer.about})"


def _errors(report: Mapping[str, Any]) -> str:
    """Each error and its count over all runs; "" if there were none."""
    counts = Counter[str]()
    for run in report["runs"]:
        for error, count in run["errors"].items():
            counts[" ".join(error.split())] += count  # one line each
    return "; ".join(f"{count:,} times `{error[:120]}`" for error, count in counts.most_common(_NUM_SHOWN_ERRORS))


def _conditions(reports: Sequence[Mapping[str, Any]], command: str) -> str:
    num_runs = max((report["num_runs"] for report in reports), default=0)
    return (
        f"{conditions(command, num_runs)}; all systems up at once, taking turns, every other "
        "run in the opposite order. CPU of the gateway's processes, all threads, engines and client excluded."
    )
