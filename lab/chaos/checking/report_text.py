"""Renders a report as text for the terminal, and as Markdown tables for a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

_NEVER: Final = ("wrong", "lost", "doubled", "miscounted")


def summary(report: dict[str, Any]) -> str:
    """The report for the terminal."""
    verdicts, latency, metering = report["verdicts"], report["latency"], report["metering"]
    lines = [
        f"{report['minutes']:g} minutes, seed {report['seed']}, {report['engine']} engine{_models(report)}: "
        f"{report['requests']:,} requests, {report['num_faults']} faults",
        "answers: "
        + ", ".join(f"{count:,} {name}" for name, count in verdicts.items() if count or name in _NEVER)
        + f", {report['overmetered']} overmetered, {report['undermetered']} undermetered, "
        f"{report['unexplained']} failed without a fault",
        f"connections: {report['connections_broken']:,} broken, {report['resumes']:,} streams resumed, "
        f"{report['retried_rejections']:,} rejections retried",
        f"usage records: {metering['billed_tokens']:,} tokens of {metering['billed_requests']:,} requests, "
        f"{metering['exact']:,} complete answers metered exactly, {metering['lost_with_their_router']} records "
        "lost with their router",
        f"first token: calm {_pair(latency['calm']['ttft'])} s, under faults {_pair(latency['disturbed']['ttft'])} s; "
        f"longest pause: calm {_pair(latency['calm']['longest_pause'])} s, "
        f"under faults {_pair(latency['disturbed']['longest_pause'])} s (p50 / p99)",
    ]
    if report["absences"]:
        counts = ", ".join(f"{count} {name}" for name, count in report["absences"].items())
        lines.append(f"requests for models that were away: {counts}")
    if report["stored"]:
        found = ", ".join(f"{count} {name}" for name, count in report["stored"].items())
        lines.append(f"stored responses at the end: {found}")
    if "tenancy" in report:
        lines += _tenancy_lines(report["tenancy"])
    if report["failures"]:
        lines.append("failures: " + ", ".join(f"{count} {name}" for name, count in report["failures"].items()))
        lines += report["explained"]
    if report["faults"]:
        lines += ["", _fault_table(report)]
    lines += ["", attack_page(report) if "attack" in report else _memory_table(report)]
    return "\n".join(lines)


def _tenancy_lines(figures: dict[str, Any]) -> list[str]:
    if "reconciliation" not in figures:
        return []
    found = figures["reconciliation"]
    counts = ", ".join(f"{count} {name}" for name, count in figures["changes"].items())
    return [
        f"usage reconcile: {found['exact']:,} answers exact, {found['metered_tokens']:,} tokens metered, "
        f"{found['delivered_tokens']:,} delivered, {found['in_flight_tokens']:,} on their way, difference "
        f"{found['difference']:,}; as clients count them: {figures['exact_for_clients']:,} complete answers exact, "
        f"{figures['lost_with_their_router']} not known, with their router",
        *(
            f"{row['tenant']}: {row['requests']:,} requests, {row['complete']:,} complete, {row['cut_short']:,} cut "
            f"short, {row['refused']:,} over a limit; spent {row['spent_nanos']:,} of {row['budget_nanos']:,} nanos, "
            f"received {row['received_nanos']:,}"
            for row in figures["tenants"]
        ),
        f"changes: {counts}; trespasses: "
        + ", ".join(f"{name} ({count})" for name, count in figures["trespasses"].items()),
    ]


def _models(report: dict[str, Any]) -> str:
    return f", {report['models']} models" if report["models"] > 1 else ""


def chaos_page(report: dict[str, Any]) -> str:
    """The Markdown between the markers of `chaos`."""
    verdicts, latency, metering = report["verdicts"], report["latency"], report["metering"]
    models = f" of each of {report['models']} models" if report["models"] > 1 else ""
    fleet = (
        f"{report['edges']} edges, {report['routers']} routers, {report['shards']} {report['engine']} shards{models}"
    )
    rows = [
        ("run", f"{report['minutes']:g} minutes, seed {report['seed']}; {fleet}; {report['users']} users"),
        ("faults", f"{report['num_faults']}"),
        ("requests", f"{report['requests']:,}"),
        ("wrong / lost / doubled", " / ".join(str(verdicts[name]) for name in ("wrong", "lost", "doubled"))),
        (
            "overmetered / undermetered / miscounted",
            f"{report['overmetered']} / {report['undermetered']} / {verdicts['miscounted']}",
        ),
        ("complete and right", f"{verdicts['ok']:,}"),
        ("left by their client (what it received was right)", f"{verdicts['left']:,}"),
        ("failed with a clear error", f"{verdicts['failed']:,}"),
        ("rejected, even after retries", f"{verdicts['refused']:,}"),
        ("broken with their connection (what was received was right)", f"{verdicts['broken']:,}"),
        ("failed without a fault that explains it", f"{report['unexplained']}"),
        ("streams resumed", f"{report['resumes']:,}"),
        (
            "metered exactly / record lost with its router",
            f"{metering['exact']:,} / {metering['lost_with_their_router']}",
        ),
        ("first token, calm (p50 / p99)", f"{_pair(latency['calm']['ttft'])} s"),
        ("first token, under faults", f"{_pair(latency['disturbed']['ttft'])} s"),
        ("longest pause in an answer, calm (p50 / p99)", f"{_pair(latency['calm']['longest_pause'])} s"),
        ("longest pause in an answer, under faults", f"{_pair(latency['disturbed']['longest_pause'])} s"),
    ]
    return "\n\n".join((_table(("", ""), rows), _fault_table(report), _memory_table(report)))


def soak_page(report: dict[str, Any]) -> str:
    """The Markdown between the markers of `soak`."""
    about = (
        f"{report['minutes']:g} minutes, {report['users']} users, {report['requests']:,} requests, "
        f"{report['verdicts']['ok'] + report['verdicts']['left']:,} of them right."
    )
    return f"{about}\n\n{_memory_table(report)}"


def attack_page(report: dict[str, Any]) -> str:
    """The Markdown between the markers of `attack`, and the end of the summary."""
    figures = report["attack"]
    heads = ("users", "requests", "wrong, lost or doubled", "failed", "429 or 503, retried", "TTFT p50 s", "TTFT p99 s")
    rows = [
        (
            name,
            f"{row['requests']:,}",
            f"{row['wrong']}",
            f"{row['failed']}",
            f"{row['rejections']}",
            f"{row['ttft']['p50']}",
            f"{row['ttft']['p99']}",
        )
        for name, row in figures["phases"].items()
    ]
    memory = [
        (row["name"], f"{row['before_mb']}", f"{row['most_mb']}", f"{row['after_mb']}", f"{row['incarnations']}")
        for row in figures["memory"]
    ]
    attacks = [
        (name, ", ".join(f"{answer} {count:,}" for answer, count in answers.items()))
        for name, answers in _by_attack(figures["answers_to_attackers"]).items()
    ]
    return "\n\n".join(
        (
            _table(heads, rows),
            _table(("process", "RSS MB before", "most during", "after", "incarnations"), memory),
            _table(("attack", "answers"), attacks),
            *_tenants_verdict(figures),
            figures["verdict"],
        )
    )


def _tenants_verdict(figures: dict[str, Any]) -> Iterator[str]:
    if "over_served" not in figures:
        return
    wrong = sum(row["wrong"] for row in figures["phases"].values())
    before, during = (_pair(figures["phases"][name]["ttft"]) for name in ("before", "during"))
    yield (
        f"{wrong} wrong, lost or doubled, {figures['over_served']} over-served, {figures['mis_metered']} mis-metered; "
        f"calm tenants' time to first token p50 / p99 {before} s without the attackers, {during} s with them"
    )


def _by_attack(answers: dict[str, int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for key, count in answers.items():
        name, _, answer = key.partition(": ")
        found.setdefault(name, {})[answer] = count
    return found


def _fault_table(report: dict[str, Any]) -> str:
    heads = ("fault", "times", "requests in flight", "failed", "restored s", "first answer s", "longest pause s")
    rows = [
        (
            row["kind"],
            str(row["count"]),
            f"{row['requests']:,}",
            str(row["failed"]),
            *(_most(row[name]) for name in ("restored_seconds", "first_answer_seconds", "longest_pause_seconds")),
        )
        for row in report["faults"]
    ]
    return _table(heads, rows)


def _memory_table(report: dict[str, Any]) -> str:
    """Under faults no process runs long enough for a slope to be meaningful."""
    if report["num_faults"]:
        heads = ("process", "incarnations", "longest watched s", "RSS MB at first", "at the end", "maximum")
        rows = [
            (row["name"], str(row["incarnations"]), f"{row['seconds']:.0f}", *_sizes(row), f"{row['most_mb']}")
            for row in report["memory"]
        ]
    else:
        heads = ("process", "watched s", "RSS MB at first", "at the end", "MB per hour", "uncertain by", "flat")
        rows = [
            (
                row["name"],
                f"{row['seconds']:.0f}",
                *_sizes(row),
                _number(row["slope_mb_per_hour"]),
                _number(row["slope_error_mb_per_hour"]),
                {None: "-", True: "yes", False: "no"}[row["is_flat"]],
            )
            for row in report["memory"]
        ]
    return _table(heads, rows)


def _sizes(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['start_mb']}", f"{row['end_mb']}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def _pair(percentiles: dict[str, float | None]) -> str:
    return f"{_number(percentiles['p50'])} / {_number(percentiles['p99'])}"


def _most(spread: dict[str, float | None]) -> str:
    return f"{_number(spread['p50'])} (at most {_number(spread['max'])})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value + 0.0:g}"  # -0.0 is a slope, too
